"""Budget of the training steps of an ordinary loop, which calls a model, `backward` and an optimizer by itself.

A step begins with the first call of a compiled graph that records gradients, and ends once all optimizers have stepped
that did so in the first one. Where a step is of another shape or mode, it begins with another graph. Calls without
gradients belong to no step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from autotuner.runtime.devices import device_runtime
from autotuner.runtime.model_memory import StaticBytes
from autotuner.runtime.step_budget import StepBudget
from autotuner.runtime.step_needs import StepNeeds


class _LoopSteps:
    """Steps that begin with one graph.

    Attributes:
        budget: decides how their regions run.
        parameters: that the graph reads.
        optimizers: that stepped in the first of them.
        is_known: whether these are all.
    """

    def __init__(self, budget: StepBudget, parameters: Iterable[nn.Parameter]) -> None:
        self.budget = budget
        self.parameters: Any = WeakIdKeyDictionary(dict.fromkeys(parameters))
        self.optimizers: WeakSet[Optimizer] = WeakSet()
        self.is_known = False

    def reads_any(self, parameters: Iterable[Tensor]) -> bool:
        return any(each in self.parameters for each in parameters)


class LoopBudget:
    """Budget of the steps of all models that were compiled with it, on one device.

    Attributes:
        budget_bytes: as given.
    """

    def __init__(self, budget_bytes: int, device: torch.device) -> None:
        """Decide nothing yet.

        Args:
            budget_bytes: that a step may need, everything that is allocated on the device.
            device: of the models.
        """
        self.budget_bytes = budget_bytes
        self._runtime = device_runtime(device)
        self._steps: WeakKeyDictionary[Callable[..., Any], _LoopSteps] = WeakKeyDictionary()
        self._open: _LoopSteps | None = None
        self._stepped: WeakSet[Optimizer] = WeakSet()

    def runs(self, graph: Callable[..., Any], parameters: Iterable[nn.Parameter]) -> Callable[..., Any]:
        """Return a compiled graph that runs within the budget.

        Args:
            parameters: that it reads.
        """

        def run(*arguments: Any) -> Any:
            if not torch.is_grad_enabled():
                return graph(*arguments)
            with self._part(own):
                return graph(*arguments)

        own = _LoopSteps(StepBudget(self.budget_bytes, self._runtime, self._static, keeps=True), parameters)
        self._steps[run] = own
        return run

    def needs(self, parameters: Sequence[Tensor] | None) -> list[StepNeeds]:
        """Return the needs of steps that begin with a graph which reads one of these parameters; None for all."""
        return [
            steps.budget.needs
            for steps in self._steps.values()
            if steps.budget.needs is not None and (parameters is None or steps.reads_any(parameters))
        ]

    def stepped(self, optimizer: Optimizer) -> None:
        """Take that an optimizer has stepped.

        Raises:
            BudgetError: at the end of the second or third step of a shape: it needs more, however its regions run.
        """
        steps = self._open
        if steps is None or not any(
            each.reads_any(group["params"]) for each in self._steps.values() for group in optimizer.param_groups
        ):
            return
        self._stepped.add(optimizer)
        if not steps.is_known:
            steps.optimizers.add(optimizer)
        elif steps.optimizers.issubset(self._stepped):
            self._close(steps)

    @contextmanager
    def _part(self, own: _LoopSteps) -> Iterator[None]:
        """Run a part of the step that is under way, or of one that begins with a graph."""
        if self._open is not None and self._stepped and not self._open.is_known:
            self._open.is_known = True
            self._close(self._open)
        if self._open is None:
            own.budget.begin(
                standing_bytes=sum(each.grad.nbytes for each in self._parameters() if each.grad is not None)
            )
            self._open, self._stepped = own, WeakSet()
        steps = self._open
        try:
            with steps.budget.under_way():
                yield
        except torch.OutOfMemoryError:
            self._open = None
            steps.budget.abandon()
            steps.budget.ran_out()
            raise

    def _close(self, steps: _LoopSteps) -> None:
        self._open = None
        steps.budget.end()

    def _optimizers(self) -> set[Optimizer]:
        return {each for steps in self._steps.values() for each in steps.optimizers}

    def _parameters(self) -> list[nn.Parameter]:
        """Return all that compiled graphs read or optimizers move."""
        read = [each for steps in self._steps.values() for each in steps.parameters]
        moved = [each for made in self._optimizers() for group in made.param_groups for each in group["params"]]
        return [*{id(each): each for each in (*read, *moved)}.values()]

    def _static(self) -> StaticBytes:
        kept = [own for made in self._optimizers() for own in made.state.values()]
        state = [value for own in kept for value in own.values() if isinstance(value, Tensor)]
        parameters = self._parameters()
        return StaticBytes(
            sum(each.nbytes for each in parameters),
            sum(each.nbytes for each in parameters if each.requires_grad),
            sum(each.nbytes for each in state),
        )


_BUDGETS: dict[tuple[torch.device, int], LoopBudget] = {}


def loop_budget(budget_bytes: int, device: torch.device) -> LoopBudget:
    """Return the budget of this size on a device, which all models share that are compiled with it."""
    if not _BUDGETS:
        register_optimizer_step_post_hook(optimizer_has_stepped)
    key = device_runtime(device).device, budget_bytes
    if key not in _BUDGETS:
        _BUDGETS[key] = LoopBudget(budget_bytes, device)
    return _BUDGETS[key]


def loop_budgets() -> list[LoopBudget]:
    """Return the budgets of this process's loops."""
    return list(_BUDGETS.values())


def needs_of(parameters: Sequence[Tensor] | None) -> tuple[StepNeeds, ...]:
    """Return the needs of steps in loops that train a model with one of these parameters, of all for None."""
    return tuple(needs for each in loop_budgets() for needs in each.needs(parameters))


def optimizer_has_stepped(optimizer: Optimizer, *_: Any) -> None:
    """Tell the budgets of loops: torch calls it behind the steps of all optimizers, once there are any budgets."""
    for budget in loop_budgets():
        budget.stepped(optimizer)
