"""Costs of ops and libraries on a device: time, and memory outside tensors."""

from .blas_workspace import Lifetime as Lifetime
from .blas_workspace import Workspace as Workspace
from .blas_workspace import cublas_workspace_bytes as cublas_workspace_bytes
from .blas_workspace import cublaslt_workspace_bytes as cublaslt_workspace_bytes
from .capability import capability_of as capability_of
from .context import context_bytes as context_bytes
from .context import kernel_image_bytes as kernel_image_bytes
from .convolution import Sizes as Sizes
from .convolution import fastest_workspace_bytes as fastest_workspace_bytes
from .convolution import with_algorithms as with_algorithms
from .convolution import workspaces as workspaces
from .interval import Interval as Interval
from .nccl import connection_bytes as connection_bytes
from .nccl import horovod_fusion_bytes as horovod_fusion_bytes
from .nccl import nccl_bytes as nccl_bytes
from .op_time import MeasuredTimes as MeasuredTimes
from .op_time import op_seconds as op_seconds
from .op_time import signature as signature
