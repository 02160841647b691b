"""What each rule must compute, in float64 NumPy, from the papers and peers' pages.

An oracle takes the rule's hyperparameters by name, the parameters (a dict from path to
array) and one dict of gradients per step, and returns the parameters after each step.
It is written without a look at the rule, so that the two cannot share a mistake: copy
the equations from the source named in the docstring, one after the other, and spend no
thought on speed. A new rule needs a function in the file of its family, and its name in
`ORACLES` there.

Gradients of complex parameters are directions to go against, and |g|^2 is their squared
magnitude: one complex entry is one quantity with one scale.
"""

from collections.abc import Callable

from oracles import (
    adam,
    adaptive,
    descendants,
    descent,
    kronecker,
    layerwise,
    learning_rate_free,
    matrices,
    matrices_low_rank,
    transforms,
    trees,
)

ORACLES: dict[str, Callable] = {
    **adam.ORACLES,
    **adaptive.ORACLES,
    **descendants.ORACLES,
    **descent.ORACLES,
    **kronecker.ORACLES,
    **layerwise.ORACLES,
    **learning_rate_free.ORACLES,
    **matrices.ORACLES,
    **matrices_low_rank.ORACLES,
    **transforms.ORACLES,
    **trees.ORACLES,
}

# Arguments without which an oracle cannot know the step: no noise, no line search.
FORETOLD: dict[str, dict] = {
    "NoisySGD": {"eta": 0.0},
    "AddNoise": {"eta": 0.0},
    "LBFGS": {"line_search": None},
}
