"""Rules that turn gradients into steps, one file per family."""

from optimjax.rules import (
    adagrad,
    adam,
    adam_mini,
    adam_momentum,
    adam_scale,
    adam_variants,
    came,
    coin,
    curvature,
    dion,
    distance,
    dual_averaging,
    factored,
    kronecker,
    lbfgs,
    learning_rate_free,
    line_search,
    loss_model,
    low_rank,
    muon,
    optimistic,
    psgd,
    sgd,
    shampoo,
    sign,
    tangent,
    trust,
    variance_reduced,
)
from optimjax.rules.adagrad import *
from optimjax.rules.adam import *
from optimjax.rules.adam_mini import *
from optimjax.rules.adam_momentum import *
from optimjax.rules.adam_scale import *
from optimjax.rules.adam_variants import *
from optimjax.rules.came import *
from optimjax.rules.coin import *
from optimjax.rules.curvature import *
from optimjax.rules.dion import *
from optimjax.rules.distance import *
from optimjax.rules.dual_averaging import *
from optimjax.rules.factored import *
from optimjax.rules.kronecker import *
from optimjax.rules.lbfgs import *
from optimjax.rules.learning_rate_free import *
from optimjax.rules.line_search import *
from optimjax.rules.loss_model import *
from optimjax.rules.low_rank import *
from optimjax.rules.muon import *
from optimjax.rules.optimistic import *
from optimjax.rules.psgd import *
from optimjax.rules.sgd import *
from optimjax.rules.shampoo import *
from optimjax.rules.sign import *
from optimjax.rules.tangent import *
from optimjax.rules.trust import *
from optimjax.rules.variance_reduced import *

__all__ = []
__all__ += adagrad.__all__
__all__ += adam.__all__
__all__ += adam_mini.__all__
__all__ += adam_momentum.__all__
__all__ += adam_scale.__all__
__all__ += adam_variants.__all__
__all__ += came.__all__
__all__ += coin.__all__
__all__ += curvature.__all__
__all__ += dion.__all__
__all__ += distance.__all__
__all__ += dual_averaging.__all__
__all__ += factored.__all__
__all__ += kronecker.__all__
__all__ += lbfgs.__all__
__all__ += learning_rate_free.__all__
__all__ += line_search.__all__
__all__ += loss_model.__all__
__all__ += low_rank.__all__
__all__ += muon.__all__
__all__ += optimistic.__all__
__all__ += psgd.__all__
__all__ += sgd.__all__
__all__ += shampoo.__all__
__all__ += sign.__all__
__all__ += tangent.__all__
__all__ += trust.__all__
__all__ += variance_reduced.__all__
