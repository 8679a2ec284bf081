"""Where blocks lie: the online allocators of frameworks and papers over a simulated device, by name.

`replay` runs one over the events of a trace, `minimum_capacity` finds the smallest device that survives them.
"""

from .base import Allocator as Allocator
from .base import SegmentEvent as SegmentEvent
from .best_fit import BestFitConfig as BestFitConfig
from .bfc import BfcConfig as BfcConfig
from .buddy import BuddyConfig as BuddyConfig
from .caching_config import CachingConfig as CachingConfig
from .chainer import ChainerConfig as ChainerConfig
from .chunked import ChunkedConfig as ChunkedConfig
from .cnmem import CnmemConfig as CnmemConfig
from .events import ALLOCATE as ALLOCATE
from .events import FREE as FREE
from .events import TRY as TRY
from .events import Events as Events
from .mxnet import MxnetConfig as MxnetConfig
from .pool_sizing import PoolSizing as PoolSizing
from .pool_sizing import size_pool as size_pool
from .registry import ALLOCATORS as ALLOCATORS
from .registry import allocator_named as allocator_named
from .replay import Replay as Replay
from .replay import layout_of as layout_of
from .replay import minimum_capacity as minimum_capacity
from .replay import replay as replay
from .two_ended import TwoEndedConfig as TwoEndedConfig
