"""Why a configuration is what it is: its plan, each operator's kernel and each tensor's forms, as figures and in words.

Everything here is read from the configuration alone. Words are whole sentences, with times in microseconds.
"""

from autotuner.plan.explanation.alternatives import Difference, Weighed, weigh
from autotuner.plan.explanation.operators import Comparison, OperatorExplanation, explain_operator
from autotuner.plan.explanation.phrases import binary, counted
from autotuner.plan.explanation.plan import Loss, PlanExplanation, explain_plan
from autotuner.plan.explanation.prices import Price, conversion_prices
from autotuner.plan.explanation.tensors import Reading, TensorExplanation, explain_tensor

__all__ = [
    "Comparison",
    "Difference",
    "Loss",
    "OperatorExplanation",
    "PlanExplanation",
    "Price",
    "Reading",
    "TensorExplanation",
    "Weighed",
    "binary",
    "conversion_prices",
    "counted",
    "explain_operator",
    "explain_plan",
    "explain_tensor",
    "weigh",
]
