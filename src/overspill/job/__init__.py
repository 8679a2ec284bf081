"""The Job: what is trained and how, for commands and functions."""

from .job import GradientOptions as GradientOptions
from .job import Job as Job
from .job import MakeOptimizer as MakeOptimizer
from .job import job_of as job_of
from .model import GivenModel as GivenModel
from .model import NamedModel as NamedModel
from .model import Script as Script
from .parallel import Parallel as Parallel
