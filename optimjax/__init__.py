"""Optimisers for JAX pytrees that know which leaves are the same array.

state        = oj.setup(rule, model)
state, model = oj.update(state, model, grads)
"""

from optimjax import (
    arrays,
    axes,
    checkpoint,
    finding,
    flat,
    hyper,
    kernels,
    leaf,
    live,
    nested,
    reading,
    rule,
    rules,
    schedules,
    show,
    state,
    step,
    ties,
    training,
    transfer,
    transforms,
    treewide,
)
from optimjax.rules import matrix

# Joined before the star imports: one of them brings a decorator called `rule`.
__all__ = ["kernels", "schedules"]
__all__ += arrays.__all__
__all__ += axes.__all__
__all__ += checkpoint.__all__
__all__ += finding.__all__
__all__ += flat.__all__
__all__ += hyper.__all__
__all__ += leaf.__all__
__all__ += live.__all__
__all__ += nested.__all__
__all__ += reading.__all__
__all__ += rule.__all__
__all__ += rules.__all__
__all__ += matrix.__all__
__all__ += show.__all__
__all__ += state.__all__
__all__ += step.__all__
__all__ += ties.__all__
__all__ += training.__all__
__all__ += transfer.__all__
__all__ += transforms.__all__
__all__ += treewide.__all__

from optimjax.arrays import *
from optimjax.axes import *
from optimjax.checkpoint import *
from optimjax.finding import *
from optimjax.flat import *
from optimjax.hyper import *
from optimjax.leaf import *
from optimjax.live import *
from optimjax.nested import *
from optimjax.reading import *
from optimjax.rule import *
from optimjax.rules import *
from optimjax.rules.matrix import *
from optimjax.show import *
from optimjax.state import *
from optimjax.step import *
from optimjax.ties import *
from optimjax.training import *
from optimjax.transfer import *
from optimjax.transforms import *
from optimjax.treewide import *
