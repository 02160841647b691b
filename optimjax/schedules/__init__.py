"""Schedules: hyperparameters that are functions of the count of updates."""

from optimjax.schedules import base, cycles, decay, joining, warming
from optimjax.schedules.base import *
from optimjax.schedules.cycles import *
from optimjax.schedules.decay import *
from optimjax.schedules.joining import *
from optimjax.schedules.warming import *

__all__ = []
__all__ += base.__all__
__all__ += cycles.__all__
__all__ += decay.__all__
__all__ += joining.__all__
__all__ += warming.__all__
