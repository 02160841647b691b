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
        {"learning_rate": 0.03, "momentum": 0.85},
        {
            "learning_rate": 0.02,
            "momentum": 0.85,
            "dampening": 0.3,
            "nesterov": True,
            "weight_decay": 0.13,
        },
        {"learning_rate": 0.03, "maximize": True, "weight_decay": 0.13},
    ],
    "Adam": [
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
    # With noise, but not so much that steps go uphill.
    "PrivateGradients": [{"max_norm": 3.3, "noise_multiplier": 0.01, "seed": 3}],
    "DoG": [{"reps_rel": 0.03, "by_layer": True}],
    "Scion": [
        {
            "learning_rate": 0.11,
            "alpha": 0.3,
            "radius": 2.0,
            "norm": lambda path, x: "rows" if x.ndim == 2 else "auto",
            "constrained": True,
            "eps": 0.03,
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
    "AdaHessian": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps": 0.03, "every": 2},
    ],
    "Sophia": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.8, "gamma": 1.7, "eps": 0.03},
    ],
    # Some of the gradients are longer than the first, some shorter.
    "ClipByGlobalNorm": [{"max_norm": 2.5}, {"max_norm": 0.4}],
}

ON_MATRICES = {"where": lambda path, x: x.ndim == 2}

VARIANTS = {
    "SGD": [
        {"learning_rate": 0.07, "weight_decay": 0.13},
        {"learning_rate": 0.03, "momentum": 0.85, "dampening": 0.3},
        {"learning_rate": 0.03, "momentum": 0.7, "nesterov": True},
        {
            "learning_rate": 0.03,
            "momentum": 0.85,
            "dampening": 0.3,
            "weight_decay": 0.13,
            "maximize": True,
        },
    ],
    "Adam": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95},
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps": 0.03},
    ],
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
    # Some units meet the first delta, and one only just; whole arrays the second.
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
        {"learning_rate": 0.11, "momentum": 0.7, "eps": 0.3, "nesterov": False},
        {
            "learning_rate": 0.11,
            "coefficients": "polar_express",
            "scale": "rms",
            "debias": True,
        },
        {
            "learning_rate": 0.11,
            "iterations": 3,
            "prescale": "aol",
            "scale": "spectral",
            "dual_norm": True,
        },
        {"coefficients": ((2.0, -1.5, 0.5), (1.5, -0.5, 0.0)), "prescale": "schatten"},
        {"coefficients": "dion", "prescale": "spectral", "scale": None},
    ],
    "NorMuon": [{"learning_rate": 0.11, "b2": 0.7, "eps": 0.3, "eps_v": 0.2}],
    "AdaMuon": [
        {"learning_rate": 0.3, "momentum": 0.7, "b2": 0.7, "eps": 0.3, "rms": 0.7},
        {"learning_rate": 0.3, "sign": False, "nesterov": True, "eps_v": 0.2},
    ],
    "ADOPT": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps": 0.3, "clip_power": 0.4},
        {"learning_rate": 0.11, "b2": 0.95, "eps": 0.6, "clip_power": None},
    ],
    "AdEMAMix": [
        {
            "learning_rate": 0.11,
            "b1": 0.7,
            "b2": 0.95,
            "b3": 0.97,
            "alpha": 2.3,
            "eps": 0.03,
            "eps_root": 0.02,
        },
        # Steps before, at and after the end of the warm-up.
        {"learning_rate": 0.11, "b1": 0.7, "b3": 0.97, "alpha": 2.3, "warmup": 7.0},
    ],
    "SimplifiedAdEMAMix": [
        {
            "learning_rate": 0.11,
            "b1": 0.7,
            "b2": 0.85,
            "alpha": 2.3,
            "eps": 0.03,
            "eps_root": 0.02,
        }
    ],
    "LaProp": [{"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps": 0.03}],
    "MADGRAD": [{"learning_rate": 0.11, "momentum": 0.7, "eps": 0.03}],
    "AdamAtan2": [{"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "a": 0.8, "b": 1.7}],
    "StableAdam": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.8, "eps": 0.3, "weight_decay": 0.17},
        {
            "learning_rate": 0.11,
            "b2": 0.95,
            "weight_decay": 0.17,
            "decay_where": lambda path, x: x.ndim == 2,
        },
    ],
    # The first is between its bounds at times; the second is always at one of them.
    "AdaBound": [
        {
            "learning_rate": 0.11,
            "b1": 0.7,
            "b2": 0.95,
            "final_rate": 0.13,
            "gamma": 0.3,
            "eps": 0.03,
        },
        {"learning_rate": 0.11, "final_rate": 0.07, "gamma": 20.0},
    ],
    "ACProp": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps": 0.03, "eps_root": 0.02}
    ],
    "Grams": [{"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps": 0.03}],
    "Tiger": [{"learning_rate": 0.11, "b1": 0.7}],
    # A delta just above the cosines of the first gradient: of its columns, whose
    # number is the unit's, and of the whole array.
    "AdamP": [
        {
            "learning_rate": 0.11,
            "b1": 0.7,
            "b2": 0.95,
            "eps": 0.03,
            "delta": 1.065,
            "weight_decay": 0.17,
            "decay_ratio": 0.3,
        },
        {
            "learning_rate": 0.11,
            "delta": 0.307,
            "weight_decay": 0.17,
            "nesterov": True,
        },
    ],
    "SGDP": [
        {
            "learning_rate": 0.03,
            "momentum": 0.7,
            "dampening": 0.3,
            "delta": 1.065,
            "weight_decay": 0.17,
            "decay_ratio": 0.3,
            "eps": 0.03,
        },
        {
            "learning_rate": 0.03,
            "momentum": 0.7,
            "delta": 0.307,
            "weight_decay": 0.17,
            "nesterov": True,
        },
    ],
    "SOAP": [
        {"learning_rate": 0.07, "b1": 0.8, "b2": 0.7, "eps": 0.05, "every": 3},
        {"learning_rate": 0.07, "shampoo_decay": 0.6, "eps": 0.05, "every": 2},
        {"learning_rate": 0.07, "one_sided": True, "bias_correction": False},
        {"max_dim": 3, "every": 4},
    ],
    "Shampoo": [
        {
            "learning_rate": 0.07,
            "b1": 0.7,
            "b2": 0.8,
            "eps": 0.05,
            "start": 2,
            "graft_eps": 0.05,
        },
        {"eps": 0.05, "start": 0, "every": 3, "graft": "adagrad", "nesterov": False},
        {"graft": None, "block_size": 2, "start": 0, "eps": 0.05, "b2": 0.9},
        {"graft": "sgd", "eps": 0.05, "start": 1, "b2": 0.9},
    ],
    "SPlus": [
        {"learning_rate": 0.07, "b1": 0.7, "b2": 0.8, "every": 3},
        {"learning_rate": 0.07, "b1": 0.7, "b2": 0.8, "every": 2, "max_dim": 3},
    ],
    "PSGDKron": [
        {
            "learning_rate": 0.07,
            "b1": 0.7,
            "precond_rate": 0.2,
            "max_rms": 0.9,
            "update_probability": 0.5,
            "balance_probability": 0.5,
            "init_scale": 0.5,
        },
        {"max_dim": 3, "momentum_into": False, "init_scale": 0.5},
    ],
    "Dion": [
        {"learning_rate": 0.07, "momentum": 0.7, "rank": 2, "seed": 3},
        {"learning_rate": 0.07, "rank": 0.5, "momentum": 0.7, "eps": 0.7},
    ],
    "Scion": [
        {"learning_rate": 0.11, "radius": 0.7, "eps": 0.7},
        {
            "learning_rate": 0.11,
            "radius": 0.7,
            "norm": lambda path, x: "columns" if x.ndim == 2 else "auto",
            "eps": 0.7,
        },
        {
            "learning_rate": 0.11,
            "radius": 0.7,
            "norm": lambda path, x: "sign" if x.ndim == 2 else "auto",
            "iterations": 3,
        },
    ],
    "GaLore": [
        {"learning_rate": 0.3, "rank": 2, "every": 5, "side": "longer"},
        {
            "learning_rate": 0.3,
            "rank": 2,
            "every": 3,
            "scale": 0.6,
            "b1": 0.7,
            "b2": 0.95,
            "eps": 0.03,
        },
    ],
    "Fira": [
        {"learning_rate": 0.07, "rank": 2, "every": 5, "scale": 0.6},
        {
            "learning_rate": 0.11,
            "rank": 2,
            "every": 3,
            "b1": 0.7,
            "b2": 0.95,
            "eps": 0.03,
            "max_growth": 1.3,
        },
    ],
    "APOLLO": [
        {
            "learning_rate": 0.07,
            "rank": 1,
            "every": 5,
            "scale": 1.7,
            "by": "array",
            "seed": 3,
        },
        {
            "learning_rate": 0.11,
            "rank": 2,
            "every": 3,
            "b1": 0.7,
            "b2": 0.95,
            "eps": 0.03,
            "max_growth": 1.3,
        },
    ],
    "AdamMini": [
        {
            "learning_rate": 0.11,
            "blocks": lambda path, x: 2 if x.shape == (3, 4) else "elements",
        },
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "eps": 0.03},
        {"learning_rate": 0.11, "blocks": "inputs"},
        {"learning_rate": 0.11, "blocks": "array"},
    ],
    "CAME": [
        {"learning_rate": 0.11, "b1": 0.7, "b2": 0.95, "b3": 0.8, "eps": 0.02},
        {"learning_rate": 0.07, "eps_instability": 0.3, "clipping_threshold": 0.6},
    ],
    "PolyakSGD": [
        {"max_learning_rate": 0.11, "scaling": 0.6, "f_min": 0.3, "eps": 0.7},
        {"scaling": 0.6, "f_min": 2.0, "variant": "sps+"},
    ],
    "LBFGS": [
        {"learning_rate": 0.7, "memory": 2},
        {"learning_rate": 0.11, "memory": 2, "keep_negative": True},
    ],
    "AdaHessian": [
        {"learning_rate": 0.11, "b2": 0.95, "hessian_power": 0.6, "every": 3},
    ],
    "Sophia": [
        {
            "learning_rate": 0.11,
            "b1": 0.7,
            "b2": 0.8,
            "gamma": 1.7,
            "clip": 0.3,
            "every": 3,
            "stale": True,
        }
    ],
    "Prodigy": [
        {"d0": 0.03, "b1": 0.7, "b2": 0.95, "eps": 0.3, "weight_decay": 0.17},
        {"d0": 0.003, "b3": 0.8, "d_coef": 30.0, "safeguard_warmup": True},
        {
            "learning_rate": 0.3,
            "d0": 0.003,
            "d_coef": 17.0,
            "growth_rate": 1.3,
            "bias_correction": False,
            "safeguard_warmup": True,
            "weight_decay": 0.17,
            "decay_where": lambda path, x: x.ndim == 2,
        },
    ],
    "DAdaptSGD": [
        {"learning_rate": 0.7, "momentum": 0.6, "d0": 0.03},
        {"learning_rate": 7.0, "d0": 0.3, "growth_rate": 1.03},
    ],
    "DAdaptAdam": [
        {"d0": 0.03, "b1": 0.7, "b2": 0.95, "eps": 0.3, "weight_decay": 0.17},
        {
            "learning_rate": 30.0,
            "d0": 0.3,
            "b1": 0.5,
            "b2": 0.6,
            "growth_rate": 1.001,
            "bias_correction": False,
            "weight_decay": 0.17,
            "decay_where": lambda path, x: x.ndim == 2,
        },
    ],
    "DAdaptLion": [
        {"learning_rate": 0.7, "b1": 0.7, "b2": 0.8, "d0": 0.03},
        {"learning_rate": 7.0, "b2": 0.8, "d0": 1.0},
    ],
    "DoG": [
        {"learning_rate": 0.7, "reps_rel": 0.03, "eps": 0.3},
        {"init_distance": 0.03, "by_layer": True},
        {"init_rate": 0.03},
    ],
    "DoWG": [{"learning_rate": 0.7, "init_distance_sq": 0.03, "eps": 0.3}],
    "MoMo": [
        {"learning_rate": 0.03, "b1": 0.7, "lower_bound": 0.6, "weight_decay": 0.17},
        {"lower_bound": 0.6, "adapt_lower_bound": True},
    ],
    "MoMoAdam": [
        {"learning_rate": 0.03, "b1": 0.7, "b2": 0.95, "weight_decay": 0.17},
        {"learning_rate": 0.7, "eps": 0.03, "lower_bound": 0.6},
        {"learning_rate": 0.7, "lower_bound": 0.6, "adapt_lower_bound": True},
    ],
    "COCOB": [{"learning_rate": 0.6, "alpha": 3.0, "eps": 0.7}],
    "ClipByValue": [{"max_value": 0.6}],
    "ClipByNorm": [{"max_norm": 0.7, "p": 0.6}, {"max_norm": 0.3, "p": math.inf}],
    "ClipByBlockRMS": [{"max_rms": 0.6}],
    "AdaptiveClip": [{"clipping": 0.3, "eps": 1.7, "axes": oj.Axes(outputs=-2)}],
    "SignDecay": [{"weight_decay": 0.17, **ON_MATRICES}],
    "CautiousWeightDecay": [{"weight_decay": 0.17, **ON_MATRICES}],
    "Scale": [{"factor": -0.3}],
    "Centralize": [{"axes": oj.Axes(outputs=-2)}],
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
    "MARS": [
        oj.MARS(INNER[0], gamma=0.3, b1=0.8, max_norm=2.0),
        oj.MARS(INNER[1], gamma=0.2, b1=0.7, exact=True),
    ],
    "Accumulate": [oj.Accumulate(inner, every=3) for inner in INNER[1:]],
    "SkipNonFinite": [oj.SkipNonFinite(inner, give_up_after=3) for inner in INNER[1:]],
    "ApplyIf": [oj.ApplyIf(inner, wide_awake) for inner in INNER[1:]],
    # A scale that fits the test's gradients, which nobody has multiplied.
    "LossScaling": [oj.LossScaling(inner, scale=4.0, period=3) for inner in INNER[1:]],
    "EMA": [
        oj.EMA(inner, decay=0.9, debias=debias)
        for inner, debias in zip(INNER, (True, False), strict=True)
    ],
    "SWA": [oj.SWA(inner, start=2) for inner in INNER[1:]],
    "Lookahead": [oj.Lookahead(inner, period=3) for inner in INNER[1:]],
    "ScheduleFree": [oj.ScheduleFree(inner) for inner in INNER[1:]],
    "Mechanic": [oj.Mechanic(inner, s_init=0.03) for inner in INNER[1:]],
    "TRAC": [oj.TRAC(inner, s_init=0.03) for inner in INNER[1:]],
    "MixedPrecision": [oj.MixedPrecision(inner) for inner in INNER[1:]],
    "Monitor": [oj.Monitor(inner) for inner in INNER[1:]],
    "Cautious": [
        oj.Cautious(inner, form=form)
        for inner, form in zip(INNER, ("count", "mean"), strict=True)
    ],
    "ClipStep": [oj.ClipStep(inner, max_rms=0.7) for inner in INNER[1:]],
    "AMSBound": [oj.AMSBound(oj.AdamW(1e-2)), oj.AMSBound(oj.RMSProp(1e-2))],
    "Decay": [
        oj.Decay(INNER[0], 0.1, "proximal"),
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
    "Masked": [oj.Masked(inner, matrices, outside=oj.SGD(0.1)) for inner in INNER[1:]],
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


# These need more than gradients and values; tests of their own have their oracles.
ELSEWHERE = {"AdaHessian", "Sophia", "PrivateGradients"}


def arithmetic_rules():
    """Those with arithmetic of their own; the others pass on that of what they hold."""
    return [
        cls
        for name, cls in rule_classes().items()
        if name not in ELSEWHERE
        and (issubclass(cls, oj.MatrixRule) or "rule" not in cls._kinds.values())
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
        # The others are for the oracle; here they would be the same promises again.
        made += [cls(**settings) for settings in SETTINGS.get(name, [])[:1]]
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
