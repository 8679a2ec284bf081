"""Where blocks lie under the allocators of other frameworks and of papers."""

from .allocators.bfc import BfcConfig as BfcConfig
from .allocators.buddy import BuddyConfig as BuddyConfig
from .allocators.chainer import ChainerConfig as ChainerConfig
from .allocators.cnmem import CnmemConfig as CnmemConfig
from .allocators.mxnet import MxnetConfig as MxnetConfig
