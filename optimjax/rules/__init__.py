"""Rules that turn gradients into steps, one file per family."""

from optimjax.rules import (
    adagrad,
    adam,
    adam_mini,
    adam_variants,
    came,
    dion,
    factored,
    lbfgs,
    line_search,
    low_rank,
    muon,
    optimistic,
    sgd,
    sign,
    trust,
)
from optimjax.rules.adagrad import *
from optimjax.rules.adam import *
from optimjax.rules.adam_mini import *
from optimjax.rules.adam_variants import *
from optimjax.rules.came import *
from optimjax.rules.dion import *
from optimjax.rules.factored import *
from optimjax.rules.lbfgs import *
from optimjax.rules.line_search import *
from optimjax.rules.low_rank import *
from optimjax.rules.muon import *
from optimjax.rules.optimistic import *
from optimjax.rules.sgd import *
from optimjax.rules.sign import *
from optimjax.rules.trust import *

__all__ = []
__all__ += adagrad.__all__
__all__ += adam.__all__
__all__ += adam_mini.__all__
__all__ += adam_variants.__all__
__all__ += came.__all__
__all__ += dion.__all__
__all__ += factored.__all__
__all__ += lbfgs.__all__
__all__ += line_search.__all__
__all__ += low_rank.__all__
__all__ += muon.__all__
__all__ += optimistic.__all__
__all__ += sgd.__all__
__all__ += sign.__all__
__all__ += trust.__all__
