"""Combinations of shapes, modes and hyperparameters that training steps come in, and what is known of each."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from autotuner.runtime.devices import Run
from autotuner.runtime.one_pass_updates import OnePassUpdates
from autotuner.runtime.parameter_gather import PartedUpdates
from autotuner.runtime.step_budget import StepBudget

WARM_UP = 2
"""Steps that run before a graph is captured: they compile the model and make the optimizer's state."""
PATIENCE = 8
"""So many run, or fewer, before processes that train together capture: they wait for each other."""
COMBINATIONS = 64
"""Combinations of which the steps are counted."""
CHANGES = (
    f"{COMBINATIONS} shapes, modes and hyperparameters of a training step came up {WARM_UP} times at most, and such "
    "steps run operator by operator: pad batches to few shapes, and for a learning rate that changes give the "
    "optimizer fused=True, or take one with an option capturable"
)
LIMITED = (
    "{} graphs of a training step are captured, and steps of any further shape, mode or hyperparameter run operator by "
    "operator: pad batches to few shapes, or raise max_graphs"
)


@dataclass(eq=False)
class Recorded:
    """Steps of one combination: how many ran before, and the graph, once there is one.

    Args:
        tuned_us: what tuned regions take in a step.
        budget: of its memory, where there is one.
        updates: whose tables the graph reads.
    """

    runs: int = 0
    tuned_us: float = 0.0
    budget: StepBudget | None = None
    replay: Run | None = None
    updates: OnePassUpdates | PartedUpdates | None = None
    inputs: list[Tensor] = field(default_factory=list)
    results: list[Tensor | None] = field(default_factory=list)

    def let_go(self) -> None:
        """Give up the graph, if there is one."""
        self.replay, self.updates, self.inputs, self.results = None, None, [], []

    @property
    def is_warm(self) -> bool:
        """Tell whether what a step runs is compiled, and decided."""
        return self.runs >= WARM_UP if self.budget is None else self.budget.is_settled


def remembered(known: Mapping[Hashable, Recorded]) -> dict[Hashable, Recorded]:
    """Return what is kept of many combinations: those that are captured, or settled."""
    return {
        key: each for key, each in known.items()
        if each.replay is not None or (each.budget is not None and each.budget.is_settled)
    }  # fmt: skip
