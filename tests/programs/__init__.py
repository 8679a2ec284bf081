"""Small training programs after patterns that people really write, one function each, and what trains and compares them."""

from tests.programs import generative, images, pairs, text, ways
from tests.programs.harness import IDENTICAL, PROGRAMS, REFUSED, Outcome, judge

__all__ = ["IDENTICAL", "PROGRAMS", "REFUSED", "Outcome", "generative", "images", "judge", "pairs", "text", "ways"]
