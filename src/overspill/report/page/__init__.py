"""The HTML report: one self-contained page, made of sections. `sections.py` defines them."""

from overspill.report.tables import Column as Column
from overspill.report.tables import Table as Table
from overspill.report.tables import Unit as Unit

from .sections import Axis as Axis
from .sections import Curve as Curve
from .sections import Figure as Figure
from .sections import Frames as Frames
from .sections import Lines as Lines
from .sections import Mark as Mark
from .sections import Ops as Ops
from .sections import Page as Page
from .sections import PasteLine as PasteLine
from .sections import Point as Point
from .sections import Points as Points
from .sections import Section as Section
from .sections import Step as Step
from .sections import StepRun as StepRun
from .sections import Tensors as Tensors
from .sections import Verdict as Verdict
from .sections import Words as Words
from .write import check_page as check_page
from .write import page_text as page_text
from .write import write_page as write_page
