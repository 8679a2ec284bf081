"""Training loops of the libraries that people use, small, one file a kind: functions that train (`loop.py`)."""

from . import hugging_face, plain, scripts, trainers
from .loop import LOOPS, Loop

__all__ = ["LOOPS", "Loop", "hugging_face", "plain", "scripts", "trainers"]
