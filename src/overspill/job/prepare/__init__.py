"""Changes that a job makes to its model before it runs."""

from .checkpointing import sharded_blocks as sharded_blocks
from .checkpointing import stack_of_blocks as stack_of_blocks
from .model import EAGER as EAGER
from .model import attention_kernel as attention_kernel
from .model import check_attention as check_attention
from .model import no_attention as no_attention
from .model import prepare as prepare
from .model import prepared_batch as prepared_batch
