"""vDNN (Rhu et al., MICRO'16): its figures and ours.

arXiv 1602.08124. Their axes are in MB of 2^20 bytes and their text divides these by 1000: 16017 MiB of feature maps are
"16 GB".
"""

from .claims import CLAIMS as CLAIMS
