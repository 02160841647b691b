"""Rules that turn gradients into steps, one file per family."""

from optimjax.rules import adam, sgd
from optimjax.rules.adam import *
from optimjax.rules.sgd import *

__all__ = []
__all__ += adam.__all__
__all__ += sgd.__all__
