"""PyTorch memory snapshots: read safely, replayed, compared, and written.

A recorded run checks the allocator's rules without anything else in between. A simulated run can be shown by the viewer
at pytorch.org/memory_viz.
"""

from .compare import replay_snapshot as replay_snapshot
from .otherwise import Otherwise as Otherwise
from .otherwise import otherwise as otherwise
from .read import Segment as Segment
from .read import Snapshot as Snapshot
from .read import TraceEntry as TraceEntry
from .read import read_snapshot as read_snapshot
from .read import snapshot_in as snapshot_in
from .result import SnapshotReplay as SnapshotReplay
from .settings import config_of as config_of
from .start import events_of as events_of
from .trace import recorded_blocks as recorded_blocks
from .trace import trace_of as trace_of
from .write import Origin as Origin
from .write import Span as Span
from .write import frames_of as frames_of
from .write import snapshot_of as snapshot_of
from .write import write_snapshot as write_snapshot
