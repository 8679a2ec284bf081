"""Place blocks: online allocators and offline solvers, by name.

`replay` runs an allocator over the events of a trace on a simulated device. `minimum_capacity` finds the smallest
device that survives them.
"""

from .allocators.base import Allocator as Allocator
from .allocators.base import SegmentEvent as SegmentEvent
from .allocators.caching_config import CachingConfig as CachingConfig
from .allocators.registry import ALLOCATORS as ALLOCATORS
from .allocators.registry import allocator_named as allocator_named
from .allocators.result import Replay as Replay
from .events import ALLOCATE as ALLOCATE
from .events import FREE as FREE
from .events import TRY as TRY
from .events import Events as Events
from .replay import layout_of as layout_of
from .replay import minimum_capacity as minimum_capacity
from .replay import replay as replay
