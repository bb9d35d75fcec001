"""Batches of several sizes compared by training steps that run: time, memory, tokens a second."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from autotuner.api.memory_picture import BatchLine, save
from autotuner.api.training import training_step
from autotuner.errors import BudgetError, InputError
from autotuner.plan.phrases import binary
from autotuner.runtime.batches import UnknownBatchError, structure_of
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.step_needs import FrontPoint, StepNeeds
from autotuner.runtime.whole_step import WholeStep
from autotuner.settings import parsed_bytes

STEPS_MAX = 12
"""Steps in which a budget settles, and a step is captured, at most."""
TOLD_SHARE = 0.01
"""Of tokens a second, by which a budget has to give more than the one before to be told of."""
TIMED = 10
"""Steps that are timed then."""


@dataclass(frozen=True)
class MemoryPoint:
    """A step with a batch under some budget: time and memory, as predicted from the steps that were measured.

    Args:
        budget_bytes: the least under which it runs so.
        step_ms: its time.
        per_second: tokens a second, or samples where the batch has none.
        repeating: regions that run their forward again in backward.
    """

    budget_bytes: int
    step_ms: float
    per_second: float
    repeating: int


@dataclass(frozen=True)
class BatchRow:
    """A batch, and what a training step with it takes.

    Args:
        shape: of its first tensor.
        samples: the extent of that along its first axis.
        tokens: elements of its first tensor of whole numbers with two axes or more, such as token ids; None for none.
        step_ms: the median of some steps; None where it cannot run.
        needs: memory of the step.
        note: why it cannot run; "" where it can.
        front: what it would take under other budgets, less or more than what was given; () where it cannot run.
    """

    shape: tuple[int, ...]
    samples: int
    tokens: int | None
    step_ms: float | None
    needs: StepNeeds | None
    note: str = ""
    front: tuple[MemoryPoint, ...] = ()

    @property
    def per_second(self) -> float:
        """Tokens a second, or samples where it has none; 0 where it cannot run."""
        return 0.0 if self.step_ms is None else 1e3 * (self.tokens or self.samples) / self.step_ms

    @property
    def name(self) -> str:
        """Its shape, as people write it."""
        return " x ".join(map(str, self.shape))

    @property
    def counted(self) -> str:
        """Name of the things that `per_second` counts: tokens or samples."""
        return "samples" if self.tokens is None else "tokens"


@dataclass(frozen=True)
class BatchComparison:
    """Batches under a budget, in the order in which they were given; `str` gives a table.

    Args:
        budget_bytes: of a whole step.
        rows: a row for each batch.
    """

    budget_bytes: int
    rows: tuple[BatchRow, ...]

    @property
    def best(self) -> BatchRow | None:
        """The batch of most tokens, or samples, a second; None where none can run."""
        ran = [row for row in self.rows if row.step_ms is not None]
        return max(ran, key=lambda row: row.per_second, default=None)

    @property
    def front(self) -> tuple[tuple[BatchRow, MemoryPoint], ...]:
        """The batch and the ways of most tokens a second under each budget, from the least on, as predicted."""
        found: list[tuple[BatchRow, MemoryPoint]] = []
        points = [(row, point) for row in self.rows for point in row.front]
        for row, point in sorted(points, key=lambda each: (each[1].budget_bytes, -each[1].per_second)):
            if not found or point.per_second > found[-1][1].per_second:
                found.append((row, point))
        return tuple(found)

    def save(self, path: str | Path) -> None:
        """Draw tokens a second against memory, a line for each batch, as predicted; points are what was measured.

        Args:
            path: of a file that ends in .svg, .png or .pdf.

        Raises:
            InputError: another ending, or no batch can run.
            MissingError: matplotlib is not installed (extra `plot`).
        """
        lines = [
            BatchLine(
                row.name, [(point.budget_bytes, point.per_second) for point in row.front],
                (row.needs.most_bytes, row.per_second),
            )
            for row in self.rows
            if row.needs is not None and row.front
        ]  # fmt: skip
        save(lines, self.budget_bytes, self.rows[0].counted, Path(path))

    def __str__(self) -> str:
        best = self.best
        lines = [f"within {binary(self.budget_bytes)} of memory:"]
        for row in self.rows:
            if row.step_ms is None or row.needs is None:
                lines.append(f"  {row.name}: {row.note}")
                continue
            again = f"{row.needs.repeating} of {row.needs.regions} regions run their forward again"
            mark = ", the most" if row is best else ""
            lines.append(
                f"  {row.name}: {row.per_second:,.0f} {row.counted} a second{mark}; a step takes {row.step_ms:,.1f} ms "
                f"and {binary(row.needs.most_bytes)}, {again}"
            )
        if self.front:
            lines.append("under other budgets, as predicted:")
        told = 0.0
        for row, point in self.front:
            if point.per_second < (1 + TOLD_SHARE) * told:
                continue
            told = point.per_second
            least = binary(point.budget_bytes)
            lines.append(f"  from {least}: {point.per_second:,.0f} {row.counted} a second, with {row.name}")
        return "\n".join(lines)


def compare_batches(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    memory_budget: int | str,
    **options: Any,
) -> BatchComparison:
    """Run training steps with batches of several sizes within a memory budget, and return what each takes.

    Each batch is tuned, unless the database knows it, or configurations or a service are given. Then it is trained with
    as `training_step` does it: each part of its model runs as fast as leaves room. Behind it, parameters, buffers and
    the optimizer's state are what they were.

    Args:
        model, optimizer, loss: as of `training_step`.
        batches: one of each size that is worth comparing, such as 8, 16 and 32 sequences.
        memory_budget: of a whole step, as of `training_step`.
        options: further ones of `training_step`, such as `database` and `max_norm`.

    Returns:
        A row for each batch; one that does not fit says what it would need.

    Raises:
        InputError: no batch, one that is no container of tensors, or what `training_step` refuses.
    """
    budget_bytes = parsed_bytes(memory_budget, "memory_budget")
    if budget_bytes is None:
        raise InputError('memory_budget is None: write a number of bytes, or one with a unit, such as "16GiB"')
    sizes = [(batch, _first(batch)) for batch in batches]
    if not sizes:
        raise InputError("there are no batches to compare: give one of each size")
    rows = []
    for batch, tensors in sizes:
        with as_before(model, optimizer):
            step_ms, needs, front, note = _tried(model, optimizer, batch, loss, budget_bytes, options)
        tokens = next((each.numel() for each in tensors if not each.is_floating_point() and each.dim() > 1), None)
        shape = tuple(tensors[0].shape)
        row = BatchRow(shape, shape[0] if shape else 1, tokens, step_ms, needs, note)
        rows.append(replace(row, front=tuple(_points(row, front))))
    return BatchComparison(budget_bytes, tuple(rows))


def _points(row: BatchRow, front: Sequence[FrontPoint]) -> Iterator[MemoryPoint]:
    """Yield the points of a batch: its step, with the time of the regions in place of what they take now."""
    if row.step_ms is not None and row.needs is not None:
        for point in front:
            step_ms = row.step_ms + (point.time_us - row.needs.time_us) / 1e3
            yield MemoryPoint(point.budget_bytes, step_ms, row.per_second * row.step_ms / step_ms, point.repeating)


def _first(batch: Any) -> Sequence[Tensor]:
    """Return the tensors of a batch, one at least."""
    tensors: list[Tensor] = []
    try:
        structure_of(batch, tensors)
    except UnknownBatchError as error:
        raise InputError(f"{error}: give batches of tensors, in mappings, lists or tuples") from None
    if not tensors:
        raise InputError(f"{batch!r} is a batch without tensors")
    return tensors


def _tried(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None,
    budget_bytes: int,
    options: Mapping[str, Any],
) -> tuple[float | None, StepNeeds | None, Sequence[FrontPoint], str]:
    """Return the time of a step, its memory, what it would take under other budgets, and a note where it cannot run."""
    step: WholeStep | None = None
    try:
        is_known = options.get("server") is not None or options.get("configurations") is not None
        examples = None if is_known else batch
        step = training_step(
            model, optimizer, loss, memory_budget=budget_bytes, **{"example_inputs": examples, **options}
        )  # fmt: skip
        for _ in range(STEPS_MAX):
            step(batch)
            if step.is_settled:
                break
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        runtime, times = device_runtime(device), []
        for _ in range(TIMED):
            began = runtime.mark()
            step(batch)
            times.append((began, runtime.mark()))
        if not step.is_settled:
            return None, None, (), f"how it runs was not settled within {STEPS_MAX} steps"
        (needs,), (front,) = step.needs, step.fronts
        return median(runtime.elapsed_us(*each) for each in times) / 1e3, needs, front, ""
    except BudgetError as error:
        return None, None, (), f"it needs {binary(error.least_bytes)} at least"
    except torch.OutOfMemoryError:
        return None, None, (), "it does not fit on the device"
    finally:
        del step
        gc.collect()


@contextmanager
def as_before(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put back parameters, buffers, the optimizer's state and the states of generators; copies wait on the host."""
    tensors = [*model.parameters(), *model.buffers()]
    copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    state = tree_map_only(Tensor, lambda tensor: tensor.to("cpu", copy=True), optimizer.state_dict())
    device = tensors[0].device if tensors else torch.device("cpu")
    with device_runtime(device).forked_random():
        try:
            yield
        finally:
            for parameter in model.parameters():
                parameter.grad = None
            with torch.no_grad():
                for tensor, kept in zip(tensors, copies, strict=True):
                    tensor.copy_(kept)
            optimizer.load_state_dict(state)
