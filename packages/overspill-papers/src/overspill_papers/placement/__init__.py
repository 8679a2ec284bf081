"""Placement in other frameworks and papers: allocators, the sizing of Dymem's pool, an integer program."""

from .allocators.best_fit import BestFitConfig as BestFitConfig
from .allocators.bfc import BfcConfig as BfcConfig
from .allocators.buddy import BuddyConfig as BuddyConfig
from .allocators.chainer import ChainerConfig as ChainerConfig
from .allocators.cnmem import CnmemConfig as CnmemConfig
from .allocators.mxnet import MxnetConfig as MxnetConfig
from .pool_sizing import PoolSizing as PoolSizing
from .pool_sizing import size_pool as size_pool
