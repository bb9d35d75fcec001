"""Explanation of a configuration: its plan, each operator's kernel and each tensor's forms, as figures and in words.

Everything here is read from the configuration alone. Words are whole sentences, with times in microseconds.
"""

from autotuner.plan.explanation.alternatives import Weighed, weigh
from autotuner.plan.explanation.operators import OperatorExplanation, explain_operator
from autotuner.plan.explanation.plan import PlanExplanation, explain_plan
from autotuner.plan.explanation.tensors import TensorExplanation, explain_tensor

__all__ = [
    "OperatorExplanation",
    "PlanExplanation",
    "TensorExplanation",
    "Weighed",
    "explain_operator",
    "explain_plan",
    "explain_tensor",
    "weigh",
]
