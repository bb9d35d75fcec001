"""Batches of several sizes compared by training steps that run: time, memory, tokens a second."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from autotuner.api.batch_sizes import TriedSize, next_size
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
        least_bytes: the least budget under which it can run; None where that is not known.
    """

    shape: tuple[int, ...]
    samples: int
    tokens: int | None
    step_ms: float | None
    needs: StepNeeds | None
    note: str = ""
    front: tuple[MemoryPoint, ...] = ()
    least_bytes: int | None = None

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
    """Batches under a budget, in the order in which they were given, or by size; `str` gives a table.

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
    batches: Iterable[Any] | Callable[[int], Any],
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    memory_budget: int | str,
    sizes_max: int = 8,
    **options: Any,
) -> BatchComparison:
    """Run training steps with batches of several sizes within a memory budget, and return what each takes.

    Each batch is tuned, unless the database knows it, or configurations or a service are given. Then it is trained with
    as `training_step` does it: each part of its model runs as fast as leaves room. Behind it, parameters, buffers and
    the optimizer's state are what they were.

    Args:
        model, optimizer, loss: as of `training_step`.
        batches: one of each size that is worth comparing, such as 8, 16 and 32 sequences; or a function that returns
            a batch of so many samples, to have sizes proposed: from 8 on, up to the largest that runs within the
            budget, and the largest that runs there with nothing given up for memory, found by what those before needed.
        memory_budget: of a whole step, as of `training_step`.
        sizes_max: so many sizes are proposed at most.
        options: further ones of `training_step`, such as `database` and `max_norm`.

    Returns:
        A row for each batch; one that does not fit says what it would need.

    Raises:
        InputError: no batch, one that is no container of tensors or of another size than was asked for, or what
            `training_step` refuses.
    """
    budget_bytes = parsed_bytes(memory_budget, "memory_budget")
    if budget_bytes is None:
        raise InputError('memory_budget is None: write a number of bytes, or one with a unit, such as "16GiB"')
    tried = partial(_tried, model, optimizer, loss, budget_bytes, options)
    if not isinstance(batches, Iterable):
        return BatchComparison(budget_bytes, _proposed(batches, tried, budget_bytes, sizes_max))
    sizes = [(batch, _first(batch)) for batch in batches]
    if not sizes:
        raise InputError("there are no batches to compare: give one of each size")
    return BatchComparison(budget_bytes, tuple(tried(*each) for each in sizes))


def _proposed(
    batch_of: Callable[[int], Any],
    tried: Callable[[Any, Sequence[Tensor]], BatchRow],
    budget_bytes: int,
    sizes_max: int,
) -> tuple[BatchRow, ...]:
    """Try sizes one after the other, and return their rows, the smallest first."""
    if sizes_max < 1:
        raise InputError(f"sizes_max is {sizes_max}: write a number above 0")
    rows: dict[int, BatchRow] = {}
    while len(rows) < sizes_max:
        size = next_size([_known(size, row) for size, row in rows.items()], budget_bytes)
        if size is None:
            break
        batch = batch_of(size)
        tensors = _first(batch)
        if tensors[0].shape[:1] != (size,):
            shape = tuple(tensors[0].shape)
            raise InputError(f"a batch of {size} samples was asked for, and its first tensor has the shape {shape}")
        rows[size] = tried(batch, tensors)
    return tuple(row for _, row in sorted(rows.items()))


def _known(size: int, row: BatchRow) -> TriedSize:
    fastest = row.front[-1].budget_bytes if row.front else None
    return TriedSize(size, row.step_ms is not None, row.least_bytes, fastest)


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
    loss: Callable[[Any, Any], Tensor] | None,
    budget_bytes: int,
    options: Mapping[str, Any],
    batch: Any,
    tensors: Sequence[Tensor],
) -> BatchRow:
    """Return what a step with a batch takes; its model is as before, behind that."""
    tokens = next((each.numel() for each in tensors if not each.is_floating_point() and each.dim() > 1), None)
    shape = tuple(tensors[0].shape)
    row = BatchRow(shape, shape[0] if shape else 1, tokens, None, None)
    with as_before(model, optimizer):
        return _trained(model, optimizer, batch, loss, budget_bytes, options, row)


def _trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None,
    budget_bytes: int,
    options: Mapping[str, Any],
    row: BatchRow,
) -> BatchRow:
    """Return a row with what some steps took, what they would take under other budgets, or why none can run."""
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
            return replace(row, note=f"how it runs was not settled within {STEPS_MAX} steps")
        (needs,), (front,) = step.needs, step.fronts
        step_ms = median(runtime.elapsed_us(*each) for each in times) / 1e3
        row = replace(row, step_ms=step_ms, needs=needs, least_bytes=needs.least_bytes)
        return replace(row, front=tuple(_points(row, front)))
    except BudgetError as error:
        least_bytes = error.least_bytes
        return replace(row, note=f"it needs {binary(least_bytes)} at least", least_bytes=least_bytes)
    except torch.OutOfMemoryError:
        return replace(row, note="it does not fit on the device")
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
