"""What a job changes about its model before it runs, wherever that is: estimated, planned, or trained."""

from .model import attention_kernel as attention_kernel
from .model import check_attention as check_attention
from .model import no_attention as no_attention
from .model import prepare as prepare
from .model import prepared_batch as prepared_batch
