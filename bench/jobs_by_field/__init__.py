"""The jobs that people bring, small, one file a field: generators that train in one of several ways (`ways.py`)."""

from . import (
    contrastive,
    experts,
    finetuning,
    generative,
    graphs,
    language,
    medical,
    reinforcement,
    speech,
    structured,
    techniques,
    vision,
)
from .job import JOBS, Job

__all__ = [
    "JOBS",
    "Job",
    "contrastive",
    "experts",
    "finetuning",
    "generative",
    "graphs",
    "language",
    "medical",
    "reinforcement",
    "speech",
    "structured",
    "techniques",
    "vision",
]
