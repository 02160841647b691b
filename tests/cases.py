"""Rules to test: every public one by its defaults, and the odd options of each.

A new rule that can be built without arguments is tested by existing: by `check_rule`,
and against its oracle. Its odd options stand in `SETTINGS`, once, for both, or, if only
the arithmetic is odd and the state like another's there, in `VARIANTS` for the oracle
alone, which is many times as fast. A rule that holds rules has its instances in
`HOLDING`.
"""

import inspect
import math

import optimjax as oj
from optimjax import rules, transforms

# Keyword arguments, beside the defaults; every set is tried on models of several paths,
# so a choice by path is a function. No special values: b1 != b2, nothing 0 or 1.
SETTINGS = {
    "SGD": [
        {"learning_rate": 0.07, "weight_decay": 0.13},
        {"learning_rate": 0.03, "momentum": 0.85},
        {"learning_rate": 0.03, "momentum": 0.85, "dampening": 0.3},
        {"learning_rate": 0.03, "momentum": 0.7, "nesterov": True},
        {
            "learning_rate": 0.02,
            "momentum": 0.85,
            "dampening": 0.3,
            "nesterov": True,
            "weight_decay": 0.13,
        },
        {"learning_rate": 0.03, "maximize": True, "weight_decay": 0.13},
        {
            "learning_rate": 0.03,
            "momentum": 0.85,
            "dampening": 0.3,
            "weight_decay": 0.13,
            "maximize": True,
        },
    ],
    "Adam": [
        {"learning_rate": 0.11},
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95},
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps": 0.03},
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps_root": 0.03},
    ],
    "AdamW": [
        {"learning_rate": 0.11, "weight_decay": 0.17},
        {"learning_rate": 0.11, "weight_decay": 0.07, "couple": False},
        {
            "learning_rate": 0.11,
            "weight_decay": 0.17,
            "decay_where": lambda path, x: x.ndim == 2,
        },
        {
            "learning_rate": 0.11,
            "b1": 0.7,
            "b2": 0.95,
            "eps": 0.03,
            "eps_root": 0.02,
            "weight_decay": 0.07,
            "couple": False,
            "decay_where": lambda path, x: x.ndim == 1,
        },
    ],
    "WeightDecay": [
        {"weight_decay": 0.07},
        {"weight_decay": 0.07, "where": lambda path, x: x.ndim == 1},
    ],
    "NAdam": [{"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "momentum_decay": 0.06}],
    "LARS": [{"learning_rate": 3.0, "momentum": None, "weight_decay": 0.17}],
    "RMSProp": [
        {
            "learning_rate": 0.03,
            "decay": 0.8,
            "eps": 0.03,
            "centered": True,
            "momentum": 0.7,
            "rate_inside": False,
        }
    ],
    "SM3": [{"learning_rate": 0.3, "momentum": None, "b2": 0.85}],
    "Adafactor": [
        {
            "learning_rate": 0.3,
            "momentum": 0.7,
            "min_dim_size_to_factor": 2,
            "weight_decay": 0.07,
        }
    ],
    # Without a line search, and with steps that float32 can tell from nothing.
    "LBFGS": [
        {
            "learning_rate": 0.11,
            "memory": 3,
            "scale_initial": False,
            "line_search": None,
        }
    ],
    # With every branch taken within the few steps of a test.
    "SOAP": [{"learning_rate": 0.11, "every": 2, "b1": 0.7, "b2": 0.8}],
    "Shampoo": [
        # With eps above the rounding of float32: blocks of one rank have eigenvalues 0.
        {"learning_rate": 0.11, "eps": 0.01, "every": 2, "start": 1, "block_size": 2}
    ],
    "SPlus": [{"learning_rate": 0.11, "every": 2, "b2": 0.8}],
    "PSGDKron": [
        {"learning_rate": 0.11, "update_probability": 0.75, "max_dim": 3, "seed": 5}
    ],
    # Some of the gradients are longer than the first, some shorter.
    "ClipByGlobalNorm": [{"max_norm": 2.5}, {"max_norm": 0.4}],
}

ON_MATRICES = {"where": lambda path, x: x.ndim == 2}

VARIANTS = {
    "Momentum": [
        {"learning_rate": 0.03, "momentum": 0.7},
        {"learning_rate": 0.03, "momentum": 0.7, "nesterov": True},
    ],
    "ASGD": [
        {"learning_rate": 0.11, "lambd": 0.3, "alpha": 0.6, "weight_decay": 0.17},
        {"learning_rate": 0.07, "lambd": 0.2, "t0": 3},
    ],
    "NoisySGD": [{"learning_rate": 0.11, "gamma": 0.3}],
    "OptimisticGradientDescent": [{"learning_rate": 0.11, "alpha": 0.6, "beta": 1.7}],
    "SignSGD": [{"learning_rate": 0.11}],
    "Signum": [{"learning_rate": 0.11, "momentum": 0.7}],
    "Lion": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "weight_decay": 0.17},
        {"learning_rate": 0.11, "decay_where": lambda path, x: x.ndim == 2},
    ],
    "Rprop": [
        {"learning_rate": 0.11, "eta_minus": 0.6, "eta_plus": 1.3},
        {"learning_rate": 0.11, "min_step_size": 0.07, "max_step_size": 0.17},
    ],
    "Fromage": [{"learning_rate": 0.11}, {"learning_rate": 0.11, "min_norm": 3.0}],
    "LARS": [
        {"learning_rate": 3.0, "weight_decay": 0.17, "separate_norms": True},
        {
            "learning_rate": 3.0,
            "trust_coefficient": 0.02,
            "eps": 0.3,
            "momentum": 0.7,
            "nesterov": True,
            "weight_decay": 0.17,
            "decay_where": lambda path, x: x.ndim == 2,
        },
        {"learning_rate": 0.03, "trust_where": lambda path, x: x.ndim == 2},
    ],
    "LAMB": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps": 0.03, "eps_root": 0.02},
        {
            "learning_rate": 0.11,
            "weight_decay": 0.17,
            "decay_where": lambda path, x: x.ndim == 2,
            "trust_where": lambda path, x: x.ndim == 1,
        },
    ],
    "NovoGrad": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.6, "weight_decay": 0.17},
        {"learning_rate": 0.11, "eps": 0.03, "eps_root": 0.02},
    ],
    "NAdam": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps": 0.03, "eps_root": 0.02}
    ],
    "NAdamW": [
        {
            "learning_rate": 0.11,
            "eps_root": 0.02,
            "momentum_decay": 0.06,
            "weight_decay": 0.17,
            "decay_where": lambda path, x: x.ndim == 2,
        }
    ],
    "AMSGrad": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.6, "eps": 0.03, "eps_root": 0.02},
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.6, "debias_v": "after"},
        {"learning_rate": 0.11, "b2": 0.6, "debias_v": "never", "debias_m": False},
    ],
    "AMSGradW": [
        {
            "learning_rate": 0.11,
            "b2": 0.6,
            "eps_root": 0.02,
            "weight_decay": 0.07,
            "couple": False,
        }
    ],
    "Adamax": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.8, "eps": 0.03},
        {"learning_rate": 0.11, "b2": 0.8, "eps": 0.03, "eps_outside": True},
    ],
    "AdamaxW": [{"learning_rate": 0.11, "weight_decay": 0.17}],
    "RAdam": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps": 0.03, "eps_root": 0.02},
        {
            "learning_rate": 0.11,
            "b2": 0.8,
            "threshold": 4.2,
            "nesterov": True,
            "debias_eps": True,
            "eps": 0.03,
        },
    ],
    "RAdamW": [
        {
            "learning_rate": 0.11,
            "b2": 0.9,
            "eps_root": 0.02,
            "weight_decay": 0.07,
            "couple": False,
        }
    ],
    "AdaBelief": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps": 0.03, "eps_root": 0.02},
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "nesterov": True},
    ],
    "AdaBeliefW": [
        {"learning_rate": 0.11, "eps": 0.03, "eps_root": 0.02, "weight_decay": 0.17}
    ],
    "Yogi": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps": 0.03, "eps_root": 0.02},
        {"learning_rate": 0.11, "initial_v": 0.3, "initial_m": 0.2, "debias": False},
    ],
    "Adan": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.85, "b3": 0.95, "eps": 0.03},
        {"learning_rate": 0.11, "weight_decay": 0.17, "eps_root": 0.02},
        {
            "learning_rate": 0.11,
            "weight_decay": 0.17,
            "proximal": False,
            "lookahead": 0.3,
            "decay_where": lambda path, x: x.ndim == 2,
        },
    ],
    "OptimisticAdam": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps": 0.03, "eps_root": 0.02},
        {"learning_rate": 0.11, "optimism": 0.6, "nesterov": True},
        {"learning_rate": 0.11, "optimism": 0.6, "double_first": True},
    ],
    "AdaGrad": [
        {"learning_rate": 0.11, "eps": 0.03, "eps_root": 0.02, "weight_decay": 0.17},
        {
            "learning_rate": 0.11,
            "initial_accumulator": 0.3,
            "learning_rate_decay": 0.2,
        },
    ],
    "AdaDelta": [
        {"learning_rate": 0.7, "decay": 0.8, "eps": 0.03, "weight_decay": 0.17}
    ],
    "RMSProp": [
        {"learning_rate": 0.03, "decay": 0.8, "eps_root": 0.02, "weight_decay": 0.17},
        {
            "learning_rate": 0.03,
            "initial_scale": 0.3,
            "momentum": 0.7,
            "nesterov": True,
            "bias_correction": True,
        },
        {
            "learning_rate": 0.03,
            "centered": True,
            "eps_root": 0.02,
            "bias_correction": True,
        },
    ],
    "SM3": [
        {"learning_rate": 0.3, "momentum": 0.7, "eps_root": 0.02},
        {"learning_rate": 0.3, "b2": 0.85},
    ],
    "Adafactor": [
        {
            "learning_rate": 0.7,
            "decay_rate": 0.6,
            "decay_offset": 2,
            "eps": 0.02,
            "clipping_threshold": 0.8,
            "parameter_scale": False,
            "relative_step": True,
        },
        {
            "learning_rate": 0.3,
            "clipping_threshold": None,
            "floor": 0.7,
            "min_scale": 2.0,
            "min_dim_size_to_factor": 2,
            "weight_decay": 0.17,
            "couple": True,
        },
        {"learning_rate": 0.3, "min_dim_size_to_factor": None},
    ],
    "Muon": [
        {
            "learning_rate": 0.11,
            "momentum": 0.7,
            "nesterov": False,
            "iterations": 3,
            "scale": "rms",
            "eps": 0.3,
        },
        {
            "learning_rate": 0.11,
            "coefficients": "polar_express",
            "scale": "spectral",
            "debias": True,
        },
        {
            "learning_rate": 0.11,
            "coefficients": ((3.9, -7.1, 3.3), (2.8, -3.1, 1.2)),
            "scale": None,
            "dual_norm": True,
        },
        {"learning_rate": 0.11, "coefficients": "dion", "prescale": "spectral"},
        {"learning_rate": 0.11, "prescale": "schatten", "momentum": 0.7},
        {"learning_rate": 0.11, "prescale": "aol", "debias": True, "nesterov": False},
    ],
    "NorMuon": [
        {
            "learning_rate": 0.11,
            "momentum": 0.7,
            "b2": 0.8,
            "eps": 0.3,
            "eps_v": 0.2,
            "scale": "rms",
        },
        {"learning_rate": 0.11, "debias": True, "dual_norm": True},
    ],
    "AdaMuon": [
        {
            "learning_rate": 0.11,
            "momentum": 0.7,
            "b2": 0.8,
            "eps": 0.3,
            "eps_v": 0.2,
            "rms": 0.6,
            "sign": False,
        },
        {"learning_rate": 0.11, "nesterov": True},
    ],
    "SOAP": [
        {"learning_rate": 0.11, "shampoo_decay": 0.7, "eps": 0.3, "every": 3},
        {"learning_rate": 0.11, "one_sided": True, "every": 2},
        {
            "learning_rate": 0.11,
            "max_dim": 3,
            "every": 1,
            "bias_correction": False,
        },
    ],
    "Shampoo": [
        {
            "learning_rate": 0.11,
            "b1": 0.7,
            "b2": 0.8,
            "eps": 0.03,
            "start": 2,
            "graft_eps": 0.3,
        },
        {"learning_rate": 0.11, "graft": "adagrad", "b2": 1.0, "start": 1},
        {"learning_rate": 0.11, "graft": "normalized", "nesterov": False, "start": 1},
        {"learning_rate": 0.11, "graft": "sign", "every": 3, "start": 1},
        {"learning_rate": 0.11, "graft": "sgd", "b2": 0.8, "block_size": 3},
        {"learning_rate": 0.11, "graft": None, "eps": 0.03, "start": 3},
    ],
    "SPlus": [{"learning_rate": 0.11, "b1": 0.7, "b2": 0.8, "every": 3, "max_dim": 3}],
    "PSGDKron": [
        {
            "learning_rate": 0.11,
            "b1": 0.7,
            "precond_rate": 0.3,
            "balance_probability": 0.4,
            "max_rms": 0.3,
            "init_scale": 1.7,
        },
        # Two of the random numbers are a little smaller.
        {"learning_rate": 0.11, "update_probability": 0.75, "momentum_into": False},
    ],
    "PolyakSGD": [
        {"max_learning_rate": 0.11, "scaling": 0.6, "f_min": 0.3, "eps": 0.7},
        {"scaling": 0.6, "f_min": 2.0, "variant": "sps+"},
    ],
    "LBFGS": [
        {"learning_rate": 0.7, "memory": 2},
        {"learning_rate": 0.11, "memory": 2, "keep_negative": True},
    ],
    "ClipByValue": [{"max_value": 0.6}],
    "ClipByNorm": [{"max_norm": 0.7, "p": 0.6}, {"max_norm": 0.3, "p": math.inf}],
    "ClipByBlockRMS": [{"max_rms": 0.6}],
    "AdaptiveClip": [{"clipping": 0.3, "eps": 1.7, "output_axes": -2}],
    "SignDecay": [{"weight_decay": 0.17, **ON_MATRICES}],
    "CautiousWeightDecay": [{"weight_decay": 0.17, **ON_MATRICES}],
    "Scale": [{"factor": -0.3}],
    "Centralize": [{"output_axes": -2}],
    "Normalize": [{"norm": 0.7, "eps": 0.3}],
    "AddNoise": [{"gamma": 0.3}],
    "TrustRatio": [{"coefficient": 0.3, "min_norm": 2.7, "eps": 0.2}],
    "ScaleByParamNorm": [{"min_norm": 2.7}],
    "ScaleByParamRMS": [{"min_rms": 0.9}],
    "ReduceOnPlateau": [{"factor": 0.3, "patience": 1}],
    "Smooth": [{"decay": 0.7, "debias": False}],
    "NonNegative": [ON_MATRICES],
    "Box": [{"lower": -0.3, "upper": 0.6}, {"lower": 0.2, "upper": 0.7, **ON_MATRICES}],
    "Simplex": [{"scale": 1.7}, {"scale": 0.6, "axis": -2, **ON_MATRICES}],
    "L2Ball": [{"radius": 1.3}, {"radius": 0.7, "axis": -2, **ON_MATRICES}],
}


def wide_awake(grads, count, **context):
    """A condition of `ApplyIf` that holds now and then."""
    return count % 3 != 1


def matrices(path, x):
    return x.ndim == 2


# What the wrappers are tried around.
INNER = (oj.SGD(0.05, momentum=0.85), oj.AdamW(1e-2))

HOLDING = {
    "Accumulate": [oj.Accumulate(inner, every=3) for inner in INNER],
    "SkipNonFinite": [oj.SkipNonFinite(inner, give_up_after=3) for inner in INNER],
    "ApplyIf": [oj.ApplyIf(inner, wide_awake) for inner in INNER],
    # A scale that fits the test's gradients, which nobody has multiplied.
    "LossScaling": [oj.LossScaling(inner, scale=4.0, period=3) for inner in INNER],
    "EMA": [
        oj.EMA(inner, decay=0.9, debias=debias)
        for inner, debias in zip(INNER, (True, False), strict=True)
    ],
    "SWA": [oj.SWA(inner, start=2) for inner in INNER],
    "Lookahead": [oj.Lookahead(inner, period=3) for inner in INNER],
    "ScheduleFree": [oj.ScheduleFree(inner) for inner in INNER],
    "MixedPrecision": [oj.MixedPrecision(inner) for inner in INNER],
    "Monitor": [oj.Monitor(inner) for inner in INNER],
    "Cautious": [
        oj.Cautious(inner, form=form)
        for inner, form in zip(INNER, ("count", "mean"), strict=True)
    ],
    "ClipStep": [oj.ClipStep(inner, max_rms=0.7) for inner in INNER],
    "AMSBound": [oj.AMSBound(oj.AdamW(1e-2)), oj.AMSBound(oj.RMSProp(1e-2))],
    "Decay": [
        *[oj.Decay(INNER[0], 0.1, how) for how in ("l2", "coupled", "proximal")],
        oj.Decay(INNER[1], 0.1, "corrected", peak=2e-2, where=matrices),
        oj.Decay(INNER[1], 0.1, "independent", cautious=True),
        oj.Decay(
            oj.Partition(
                {"matrices": oj.Adam(1e-2), "others": oj.SGD(0.1, momentum=0.8)},
                lambda path, x: "matrices" if x.ndim == 2 else "others",
            ),
            0.1,
            "schedule",
            peak=2.0,
        ),
    ],
    "Masked": [oj.Masked(inner, matrices, outside=oj.SGD(0.1)) for inner in INNER],
    "Chain": [oj.Chain(oj.ClipByGlobalNorm(0.7), oj.WeightDecay(0.1), oj.SGD(0.1))],
    "Partition": [
        oj.Partition(
            {"matrices": oj.Adam(1e-2), "others": oj.SGD(0.1, momentum=0.8)},
            lambda path, x: "matrices" if x.ndim == 2 else "others",
        )
    ],
    "SGD": [oj.SGD(0.1, momentum=0.85, state_dtype="bfloat16")],
}


def rule_classes():
    """Every public class of rules and transforms that is a rule, by name."""
    names = {name: vars(m)[name] for m in (rules, transforms) for name in m.__all__}
    names["Chain"] = oj.Chain
    return {
        name: each
        for name, each in sorted(names.items())
        if inspect.isclass(each) and issubclass(each, oj.Rule)
    }


def arithmetic_rules():
    """Those with arithmetic of their own; the others pass on that of what they hold."""
    return [
        cls
        for cls in rule_classes().values()
        if issubclass(cls, oj.MatrixRule) or "rule" not in cls._kinds.values()
    ]


def required(cls):
    """The names of the arguments that have no default."""
    return [
        p.name
        for p in inspect.signature(cls).parameters.values()
        if p.default is p.empty
    ]


def all_rules():
    """An instance of every public rule, and of its odd options."""
    found = []
    for name, cls in rule_classes().items():
        if cls.freezes:  # no step, and nothing kept: there is no promise to try
            continue
        # LBFGS with its line search takes a minute to compile: test_line_search has it.
        made = [] if required(cls) or name == "LBFGS" else [cls()]
        made += [cls(**settings) for settings in SETTINGS.get(name, [])]
        made += HOLDING.get(name, [])
        if not made:
            raise LookupError(
                f"{name} cannot be built without {', '.join(required(cls))}: add "
                "instances of it to HOLDING, or arguments to SETTINGS, in "
                "tests/cases.py."
            )
        found += made
    return found


ALL = all_rules()
