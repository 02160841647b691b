"""The rules that `benchmarks.convergence` compares: one line for each.

Options are the defaults, so that what is compared is what a user gets first, unless a
default is meant for larger arrays or the rule asks for a choice. Weight decay, where it
is the rule's, is its default and spares vectors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optimjax as oj

Make = Callable[[Any], oj.Rule]


class Contender(NamedTuple):
    """Attributes:
    make: the rule, from its learning rate (a schedule).
    centre: the learning rate in the middle of the grid.
    tuned: False for a rule that finds its own: the grid is `centre` alone.
    falls: False for a rule whose averaging stands in place of a falling rate.
    """

    make: Make
    centre: float
    tuned: bool = True
    falls: bool = True


def decaying(rule: Any, **options: Any) -> Make:
    return lambda rate: rule(rate, decay_where=oj.matrices, **options)


def schedule_free(rate: Any) -> oj.Rule:
    """What its authors call AdamW, without the decay."""
    return oj.ScheduleFree(oj.RMSProp(rate, decay=0.999, bias_correction=True))


CONTENDERS = {
    # gradients
    "SGD": Contender(lambda r: oj.SGD(r), 0.3),
    "SGD, momentum": Contender(lambda r: oj.SGD(r, momentum=0.9), 0.03),
    "SGD, Nesterov": Contender(lambda r: oj.SGD(r, momentum=0.9, nesterov=True), 0.03),
    "ASGD": Contender(lambda r: oj.ASGD(r), 0.3),
    "PolyakSGD": Contender(lambda r: oj.PolyakSGD(r), 0.3),
    # signs and trust ratios
    "SignSGD": Contender(lambda r: oj.SignSGD(r), 1e-3),
    "Signum": Contender(lambda r: oj.Signum(r), 1e-3),
    "Lion": Contender(decaying(oj.Lion), 1e-3),
    "Fromage": Contender(lambda r: oj.Fromage(r), 0.03),
    "LARS": Contender(lambda r: oj.LARS(r), 10.0),
    "LAMB": Contender(lambda r: oj.LAMB(r), 0.01),
    "NovoGrad": Contender(lambda r: oj.NovoGrad(r), 0.01),
    # Adam and its kin
    "AdamW": Contender(decaying(oj.AdamW), 0.01),
    "Adam": Contender(lambda r: oj.Adam(r), 0.01),
    "NAdam": Contender(lambda r: oj.NAdam(r), 0.01),
    "AMSGrad": Contender(lambda r: oj.AMSGrad(r), 0.01),
    "Adamax": Contender(lambda r: oj.Adamax(r), 0.01),
    "RAdam": Contender(lambda r: oj.RAdam(r), 0.01),
    "AdaBelief": Contender(lambda r: oj.AdaBelief(r), 0.01),
    "Yogi": Contender(lambda r: oj.Yogi(r), 0.01),
    "Adan": Contender(lambda r: oj.Adan(r), 0.01),
    "OptimisticAdam": Contender(lambda r: oj.OptimisticAdam(r), 0.01),
    # sums of squares
    "AdaGrad": Contender(lambda r: oj.AdaGrad(r), 0.1),
    "AdaDelta": Contender(lambda r: oj.AdaDelta(r), 1.0),
    "RMSProp": Contender(lambda r: oj.RMSProp(r), 3e-3),
    "SM3": Contender(lambda r: oj.SM3(r), 0.1),
    "Adafactor": Contender(lambda r: oj.Adafactor(r, min_dim_size_to_factor=32), 0.01),
    # Adam's descendants
    "ADOPT": Contender(lambda r: oj.ADOPT(r), 0.01),
    "AdEMAMix": Contender(lambda r: oj.AdEMAMix(r), 0.01),
    "SimplifiedAdEMAMix": Contender(lambda r: oj.SimplifiedAdEMAMix(r), 1e-3),
    "LaProp": Contender(lambda r: oj.LaProp(r), 0.01),
    "AdamAtan2": Contender(lambda r: oj.AdamAtan2(r), 0.01),
    "StableAdam": Contender(lambda r: oj.StableAdam(r), 0.01),
    "AdaBound": Contender(lambda r: oj.AdaBound(r), 0.01),
    "ACProp": Contender(lambda r: oj.ACProp(r), 0.01),
    "Grams": Contender(lambda r: oj.Grams(r), 3e-3),
    "Tiger": Contender(lambda r: oj.Tiger(r), 1e-3),
    "MADGRAD": Contender(lambda r: oj.MADGRAD(r), 0.03),
    "AdamP": Contender(lambda r: oj.AdamP(r), 0.01),
    "SGDP": Contender(lambda r: oj.SGDP(r), 0.03),
    "MARS(AdamW)": Contender(lambda r: oj.MARS(decaying(oj.AdamW)(r)), 0.01),
    "Cautious(AdamW)": Contender(lambda r: oj.Cautious(decaying(oj.AdamW)(r)), 0.01),
    "Decay(Adam, 0.1)": Contender(
        lambda r: oj.Decay(oj.Adam(r), 0.1, where=oj.matrices), 0.01
    ),
    # second order; every estimate costs a gradient and more
    "AdaHessian": Contender(lambda r: oj.AdaHessian(r), 0.1),
    "Sophia": Contender(lambda r: oj.Sophia(r), 3e-3),
    # matrices; with scale="rms" one rate serves them and the rest
    "Muon": Contender(lambda r: oj.Muon(r, scale="rms", aux=oj.Adam(r)), 0.01),
    "NorMuon": Contender(lambda r: oj.NorMuon(r, scale="rms", aux=oj.Adam(r)), 0.01),
    "AdaMuon": Contender(lambda r: oj.AdaMuon(r, aux=oj.Adam(r)), 0.01),
    "SOAP": Contender(lambda r: oj.SOAP(r, aux=oj.Adam(r)), 0.01),
    "Shampoo": Contender(lambda r: oj.Shampoo(r, aux=oj.Adam(r)), 0.01),
    "SPlus": Contender(lambda r: oj.SPlus(r, every=20, aux=oj.Adam(0.01)), 0.3),
    "PSGDKron": Contender(lambda r: oj.PSGDKron(r, aux=oj.Adam(r)), 3e-3),
    "Dion": Contender(lambda r: oj.Dion(r, aux=oj.Adam(0.01)), 0.03),
    "Scion": Contender(lambda r: oj.Scion(r, radius=1.0), 0.03),
    # less memory
    "CAME": Contender(lambda r: oj.CAME(r), 3e-3),
    "AdamMini": Contender(lambda r: oj.AdamMini(r), 0.01),
    "GaLore": Contender(
        lambda r: oj.GaLore(r, rank=8, every=50, scale=1.0, aux=oj.Adam(r)), 0.01
    ),
    "Fira": Contender(lambda r: oj.Fira(r, rank=8, every=50, aux=oj.Adam(r)), 0.01),
    "APOLLO": Contender(lambda r: oj.APOLLO(r, rank=8, every=50, aux=oj.Adam(r)), 0.01),
    # without a learning rate
    "Prodigy": Contender(lambda r: oj.Prodigy(r), 1.0, tuned=False),
    "DAdaptAdam": Contender(lambda r: oj.DAdaptAdam(r), 1.0, tuned=False),
    "DAdaptLion": Contender(lambda r: oj.DAdaptLion(r), 1.0, tuned=False),
    "DoG": Contender(lambda r: oj.DoG(r), 1.0, tuned=False),
    "DoWG": Contender(lambda r: oj.DoWG(r), 1.0, tuned=False),
    "MoMo": Contender(lambda r: oj.MoMo(r), 1.0, tuned=False),
    "MoMoAdam": Contender(lambda r: oj.MoMoAdam(r), 0.01),
    "COCOB": Contender(lambda r: oj.COCOB(r), 1.0, tuned=False),
    "Mechanic(Adam)": Contender(lambda r: oj.Mechanic(oj.Adam(r)), 0.01, tuned=False),
    # averages
    "ScheduleFree": Contender(schedule_free, 0.01, falls=False),
    "Lookahead(Adam)": Contender(lambda r: oj.Lookahead(oj.Adam(r)), 0.01),
}
