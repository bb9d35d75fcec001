"""A configuration as one HTML page for people: what was chosen, against what else was measured. Knows no torch."""

from autotuner.plan.report.compare import Failure, StepComparison, TimedCandidate, compare, tally
from autotuner.plan.report.page import render

__all__ = ["Failure", "StepComparison", "TimedCandidate", "compare", "render", "tally"]
