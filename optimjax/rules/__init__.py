"""Rules that turn gradients into steps, one file per family."""

from optimjax.rules import (
    adagrad,
    adam,
    adam_variants,
    factored,
    kronecker,
    lbfgs,
    line_search,
    muon,
    optimistic,
    psgd,
    sgd,
    shampoo,
    sign,
    trust,
)
from optimjax.rules.adagrad import *
from optimjax.rules.adam import *
from optimjax.rules.adam_variants import *
from optimjax.rules.factored import *
from optimjax.rules.kronecker import *
from optimjax.rules.lbfgs import *
from optimjax.rules.line_search import *
from optimjax.rules.muon import *
from optimjax.rules.optimistic import *
from optimjax.rules.psgd import *
from optimjax.rules.sgd import *
from optimjax.rules.shampoo import *
from optimjax.rules.sign import *
from optimjax.rules.trust import *

__all__ = []
__all__ += adagrad.__all__
__all__ += adam.__all__
__all__ += adam_variants.__all__
__all__ += factored.__all__
__all__ += kronecker.__all__
__all__ += lbfgs.__all__
__all__ += line_search.__all__
__all__ += muon.__all__
__all__ += optimistic.__all__
__all__ += psgd.__all__
__all__ += sgd.__all__
__all__ += shampoo.__all__
__all__ += sign.__all__
__all__ += trust.__all__
