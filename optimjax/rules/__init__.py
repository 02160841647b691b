"""Rules that turn gradients into steps, one file per family."""

from optimjax.rules import (
    adagrad,
    adam,
    adam_variants,
    coin,
    distance,
    factored,
    lbfgs,
    learning_rate_free,
    line_search,
    loss_model,
    optimistic,
    sgd,
    sign,
    trust,
)
from optimjax.rules.adagrad import *
from optimjax.rules.adam import *
from optimjax.rules.adam_variants import *
from optimjax.rules.coin import *
from optimjax.rules.distance import *
from optimjax.rules.factored import *
from optimjax.rules.lbfgs import *
from optimjax.rules.learning_rate_free import *
from optimjax.rules.line_search import *
from optimjax.rules.loss_model import *
from optimjax.rules.optimistic import *
from optimjax.rules.sgd import *
from optimjax.rules.sign import *
from optimjax.rules.trust import *

__all__ = []
__all__ += adagrad.__all__
__all__ += adam.__all__
__all__ += adam_variants.__all__
__all__ += coin.__all__
__all__ += distance.__all__
__all__ += factored.__all__
__all__ += lbfgs.__all__
__all__ += learning_rate_free.__all__
__all__ += line_search.__all__
__all__ += loss_model.__all__
__all__ += optimistic.__all__
__all__ += sgd.__all__
__all__ += sign.__all__
__all__ += trust.__all__
