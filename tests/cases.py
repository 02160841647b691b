"""Rules to test: every public one by its defaults, and the odd options of each.

A new rule that can be built without arguments is tested by existing: by `check_rule`,
and against its oracle. Its odd options stand in `SETTINGS`, once, for both; a rule that
holds rules has its instances in `HOLDING`.
"""

import inspect

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
    # Some of the gradients are longer than the first, some shorter.
    "ClipByGlobalNorm": [{"max_norm": 2.5}, {"max_norm": 0.4}],
}

HOLDING = {
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
    return [cls for cls in rule_classes().values() if "rule" not in cls._kinds.values()]


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
        made = [] if required(cls) else [cls()]
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
