"""What stands around a rule: decay, clipping, groups."""

from optimjax.transforms import basic, clipping, decay, partition
from optimjax.transforms.basic import *
from optimjax.transforms.clipping import *
from optimjax.transforms.decay import *
from optimjax.transforms.partition import *

__all__ = []
__all__ += basic.__all__
__all__ += clipping.__all__
__all__ += decay.__all__
__all__ += partition.__all__
