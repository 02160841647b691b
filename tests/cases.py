"""Rules to test: every public one by its defaults, and the odd options of each.

A new rule that can be built without arguments is tested by existing. One that cannot,
or whose options change what it does, has its cases in `ODD`.
"""

import inspect

import optimjax as oj
from optimjax import rules, transforms

# Class name -> instances beside the default one, or in its place where there is none.
ODD = {
    "AdamW": [
        oj.AdamW(1e-2, b1=0.85, b2=0.98, weight_decay=0.1, couple=False),
        oj.AdamW(1e-2, weight_decay=0.3, decay_where=lambda path, x: x.ndim > 1),
    ],
    "Adam": [oj.Adam(1e-2, b1=0.7, b2=0.95, eps=1e-4, eps_root=1e-3)],
    "Chain": [oj.Chain(oj.ClipByGlobalNorm(0.7), oj.WeightDecay(0.1), oj.SGD(0.1))],
    "Partition": [
        oj.Partition(
            {"matrices": oj.Adam(1e-2), "others": oj.SGD(0.1, momentum=0.8)},
            lambda path, x: "matrices" if x.ndim == 2 else "others",
        )
    ],
    "SGD": [
        oj.SGD(0.1, momentum=0.85),
        oj.SGD(0.1, momentum=0.85, dampening=0.3, weight_decay=0.05),
        oj.SGD(0.1, momentum=0.85, nesterov=True, maximize=True),
        oj.SGD(0.1, momentum=0.85, state_dtype="bfloat16"),
    ],
    "WeightDecay": [oj.WeightDecay(0.2, where=lambda path, x: x.ndim > 1)],
}


def rule_classes():
    """Every public class of rules and transforms that is a rule."""
    names = {name: vars(m)[name] for m in (rules, transforms) for name in m.__all__}
    names["Chain"] = oj.Chain
    return {
        name: each
        for name, each in sorted(names.items())
        if inspect.isclass(each) and issubclass(each, oj.Rule)
    }


def all_rules():
    """An instance of every public rule, and of its odd options."""
    found = []
    for name, cls in rule_classes().items():
        required = [
            p.name
            for p in inspect.signature(cls).parameters.values()
            if p.default is p.empty and p.kind is not p.VAR_POSITIONAL
        ]
        if not required and cls is not oj.Chain:
            found.append(cls())
        elif name not in ODD:
            raise LookupError(
                f"{name} cannot be built without {', '.join(required)}: add instances "
                "of it to ODD in tests/cases.py."
            )
        found += ODD.get(name, [])
    return found


ALL = all_rules()
