"""Data types that all stages share: Graph, Device, Schedule, Trace, Layout, Timeline.

They import nothing from the other folders of Overspill.
"""

from .device import Device as Device
from .frames import Frame as Frame
from .graph import Algorithm as Algorithm
from .graph import Collective as Collective
from .graph import CollectiveKind as CollectiveKind
from .graph import Graph as Graph
from .graph import LayerType as LayerType
from .graph import Op as Op
from .graph import Phase as Phase
from .graph import Tensor as Tensor
from .graph import TensorKind as TensorKind
from .graph import numbered as numbered
from .layout import Layout as Layout
from .layout import Places as Places
from .schedule import MOST_TOGETHER as MOST_TOGETHER
from .schedule import OF_OPS as OF_OPS
from .schedule import Instruction as Instruction
from .schedule import Schedule as Schedule
from .schedule import Verb as Verb
from .tiers import DiskStay as DiskStay
from .tiers import Tiers as Tiers
from .timeline import COPIES as COPIES
from .timeline import HOST as HOST
from .timeline import Event as Event
from .timeline import Stall as Stall
from .timeline import Stream as Stream
from .timeline import Timeline as Timeline
from .trace import Block as Block
from .trace import Mobility as Mobility
from .trace import Trace as Trace
