"""The jobs that people bring, small, one file a field: generators that train in one of several ways (`ways.py`)."""

from . import finetuning, generative, graphs, language, structured, techniques, vision
from .job import JOBS, Job

__all__ = ["JOBS", "Job", "finetuning", "generative", "graphs", "language", "structured", "techniques", "vision"]
