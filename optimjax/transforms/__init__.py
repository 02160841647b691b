"""What stands around a rule: clipping, decay, averages, guards, groups, precision."""

from optimjax.transforms import (
    accumulation,
    averaging,
    basic,
    clipping,
    decay,
    guarding,
    modifiers,
    monitor,
    partition,
    plateau,
    precision,
    privacy,
    projections,
    schedule_free,
    shaping,
    tuning,
)
from optimjax.transforms.accumulation import *
from optimjax.transforms.averaging import *
from optimjax.transforms.basic import *
from optimjax.transforms.clipping import *
from optimjax.transforms.decay import *
from optimjax.transforms.guarding import *
from optimjax.transforms.modifiers import *
from optimjax.transforms.monitor import *
from optimjax.transforms.partition import *
from optimjax.transforms.plateau import *
from optimjax.transforms.precision import *
from optimjax.transforms.privacy import *
from optimjax.transforms.projections import *
from optimjax.transforms.schedule_free import *
from optimjax.transforms.shaping import *
from optimjax.transforms.tuning import *

__all__ = []
__all__ += accumulation.__all__
__all__ += averaging.__all__
__all__ += basic.__all__
__all__ += clipping.__all__
__all__ += decay.__all__
__all__ += guarding.__all__
__all__ += modifiers.__all__
__all__ += monitor.__all__
__all__ += partition.__all__
__all__ += plateau.__all__
__all__ += precision.__all__
__all__ += privacy.__all__
__all__ += projections.__all__
__all__ += schedule_free.__all__
__all__ += shaping.__all__
__all__ += tuning.__all__
