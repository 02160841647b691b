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
    "SGD": Contender(oj.SGD, 0.3),
    "SGD, momentum": Contender(lambda r: oj.SGD(r, momentum=0.9), 0.03),
    "SGD, Nesterov": Contender(lambda r: oj.SGD(r, momentum=0.9, nesterov=True), 0.03),
    "ASGD": Contender(oj.ASGD, 0.3),
    "PolyakSGD": Contender(oj.PolyakSGD, 0.3),
    # signs and trust ratios
    "SignSGD": Contender(oj.SignSGD, 1e-3),
    "Signum": Contender(oj.Signum, 1e-3),
    "Lion": Contender(decaying(oj.Lion), 1e-3),
    "Fromage": Contender(oj.Fromage, 0.03),
    "LARS": Contender(oj.LARS, 10.0),
    "LAMB": Contender(oj.LAMB, 0.01),
    "NovoGrad": Contender(oj.NovoGrad, 0.01),
    # Adam and its kin
    "AdamW": Contender(decaying(oj.AdamW), 0.01),
    "Adam": Contender(oj.Adam, 0.01),
    "NAdam": Contender(oj.NAdam, 0.01),
    "AMSGrad": Contender(oj.AMSGrad, 0.01),
    "Adamax": Contender(oj.Adamax, 0.01),
    "RAdam": Contender(oj.RAdam, 0.01),
    "AdaBelief": Contender(oj.AdaBelief, 0.01),
    "Yogi": Contender(oj.Yogi, 0.01),
    "Adan": Contender(oj.Adan, 0.01),
    "OptimisticAdam": Contender(oj.OptimisticAdam, 0.01),
    # sums of squares
    "AdaGrad": Contender(oj.AdaGrad, 0.1),
    "AdaDelta": Contender(oj.AdaDelta, 1.0),
    "RMSProp": Contender(oj.RMSProp, 3e-3),
    "SM3": Contender(oj.SM3, 0.1),
    "Adafactor": Contender(lambda r: oj.Adafactor(r, min_dim_size_to_factor=32), 0.01),
    # Adam's descendants
    "ADOPT": Contender(oj.ADOPT, 0.01),
    "AdEMAMix": Contender(oj.AdEMAMix, 0.01),
    "SimplifiedAdEMAMix": Contender(oj.SimplifiedAdEMAMix, 1e-3),
    "LaProp": Contender(oj.LaProp, 0.01),
    "AdamAtan2": Contender(oj.AdamAtan2, 0.01),
    "StableAdam": Contender(oj.StableAdam, 0.01),
    "AdaBound": Contender(oj.AdaBound, 0.01),
    "ACProp": Contender(oj.ACProp, 0.01),
    "Grams": Contender(oj.Grams, 3e-3),
    "Tiger": Contender(oj.Tiger, 1e-3),
    "MADGRAD": Contender(oj.MADGRAD, 0.03),
    "AdamP": Contender(oj.AdamP, 0.01),
    "SGDP": Contender(oj.SGDP, 0.03),
    "MARS(AdamW)": Contender(lambda r: oj.MARS(decaying(oj.AdamW)(r)), 0.01),
    "Cautious(AdamW)": Contender(lambda r: oj.Cautious(decaying(oj.AdamW)(r)), 0.01),
    "Decay(Adam, 0.1)": Contender(
        lambda r: oj.Decay(oj.Adam(r), 0.1, where=oj.matrices), 0.01
    ),
    # second order; every estimate costs a gradient and more
    "AdaHessian": Contender(oj.AdaHessian, 0.1),
    "Sophia": Contender(oj.Sophia, 3e-3),
    # matrices; with scale="rms" one rate serves them and the rest
    "Muon": Contender(lambda r: oj.Muon(r, scale="rms", aux=oj.Adam(r)), 0.01),
    "NorMuon": Contender(lambda r: oj.NorMuon(r, scale="rms", aux=oj.Adam(r)), 0.01),
    "AdaMuon": Contender(lambda r: oj.AdaMuon(r, aux=oj.Adam(r)), 0.01),
    "SOAP": Contender(lambda r: oj.SOAP(r, aux=oj.Adam(r)), 0.01),
    "Shampoo": Contender(lambda r: oj.Shampoo(r, aux=oj.Adam(0.01)), 1e-3),
    "SPlus": Contender(lambda r: oj.SPlus(r, every=20, aux=oj.Adam(0.01)), 0.3),
    "PSGDKron": Contender(lambda r: oj.PSGDKron(r, aux=oj.Adam(r)), 3e-3),
    "Dion": Contender(lambda r: oj.Dion(r, aux=oj.Adam(0.01)), 0.03),
    "Scion": Contender(lambda r: oj.Scion(r, radius=1.0), 0.03),
    # less memory
    "CAME": Contender(oj.CAME, 3e-3),
    "AdamMini": Contender(oj.AdamMini, 0.01),
    "GaLore": Contender(
        lambda r: oj.GaLore(r, rank=8, every=50, scale=1.0, aux=oj.Adam(r)), 0.01
    ),
    "Fira": Contender(lambda r: oj.Fira(r, rank=8, every=50, aux=oj.Adam(r)), 0.01),
    "APOLLO": Contender(lambda r: oj.APOLLO(r, rank=8, every=50, aux=oj.Adam(r)), 0.01),
    # without a learning rate
    "Prodigy": Contender(oj.Prodigy, 1.0, tuned=False),
    "DAdaptAdam": Contender(oj.DAdaptAdam, 1.0, tuned=False),
    "DAdaptLion": Contender(oj.DAdaptLion, 1.0, tuned=False),
    "DoG": Contender(oj.DoG, 1.0, tuned=False),
    "DoWG": Contender(oj.DoWG, 1.0, tuned=False),
    "MoMo": Contender(oj.MoMo, 1.0, tuned=False),
    "MoMoAdam": Contender(oj.MoMoAdam, 0.01),
    "COCOB": Contender(oj.COCOB, 1.0, tuned=False),
    "Mechanic(Adam)": Contender(lambda r: oj.Mechanic(oj.Adam(r)), 0.01, tuned=False),
    # averages
    "ScheduleFree": Contender(schedule_free, 0.01, falls=False),
    "Lookahead(Adam)": Contender(lambda r: oj.Lookahead(oj.Adam(r)), 0.01),
}
