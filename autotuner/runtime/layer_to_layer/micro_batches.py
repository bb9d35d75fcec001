"""Batches in parts along their first axis, and how large these are: as given, or as the first steps have shown.

A layer's work is the same for few large micro-batches and for many small ones. Large ones need fewer calls from Python
and larger kernels, and more memory. Which is fastest is measured by training steps, each of which counts as one: of a
size that divides the batch, then of the next one that is at least twice as large, as long as that pays and has room.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from autotuner.errors import InputError
from autotuner.runtime.batches import UnknownBatchError, structure_of
from autotuner.runtime.layer_to_layer.times import LayerTimes

TIMED = 2
"""Steps of a size that are timed, behind a first one that compiles."""
PAYS = 0.02
"""Of the time of a step, that a larger size has to save."""
IGNORED = -100
"""The label that counts in no loss, as torch and transformers have it."""


@dataclass(frozen=True)
class Part:
    """A micro-batch.

    Args:
        batch: of fewer rows.
        divisor: of its loss, so that all of them add up to that of what was given.
    """

    batch: Any
    divisor: float


@dataclass
class SizeChoice:
    """Rows of the micro-batches of one shape of batches, as steps show which are fastest.

    Args:
        sizes: that are tried, from the smallest on.

        place: of the size that is tried first.

    Attributes:
        seconds: of a step, for each size that was tried: the least of some.
        is_settled: whether no other size is tried.
        is_limited: whether that is so because a larger one does not pay, or has no room: with more rows, too.
    """

    sizes: Sequence[int]
    place: int = 0
    seconds: dict[int, float] = field(default_factory=dict)
    is_settled: bool = False
    is_limited: bool = False
    _timed: list[float] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Rows of the next step's micro-batches."""
        return self.sizes[self.place]

    def note(self, times: LayerTimes, has_room: Callable[[int, int], bool]) -> None:
        """Note a step of this size.

        Args:
            times: of the step.
            has_room: says of this size and another one whether micro-batches of that one fit, too.
        """
        if self.is_settled:
            return
        self._timed.append(times.measured)
        if len(self._timed) <= TIMED:
            return
        self.seconds[self.size] = seconds = min(self._timed[1:])
        self._timed.clear()
        before = self.seconds.get(self.sizes[self.place - 1])
        pays = len(self.seconds) == 1 or before is None or seconds < (1 - PAYS) * before
        larger = self.sizes[self.place + 1 :][:1]
        fits = not larger or has_room(self.size, larger[0])
        if pays and times.is_computing and larger and fits:
            self.place += 1
            return
        least = min(self.seconds.values())
        near = [size for size, seconds in self.seconds.items() if (1 - PAYS) * seconds <= least]
        self.place, self.is_settled = self.sizes.index(min(near)), True
        self.is_limited = not (pays and fits)

    def __str__(self) -> str:
        tried = ", ".join(f"{size}: {1e3 * seconds:,.0f} ms" for size, seconds in self.seconds.items())
        said = f"micro-batches of {self.size}" + ("" if self.is_settled else ", which is being tried")
        return said + (f" (a step with each size, {tried})" if tried else "")


class MicroBatches:
    """Parts batches.

    Args:
        size: rows of a micro-batch; "auto" for what steps show.
        shifts: whether the first label of each row counts in no loss, as in models that predict the next token.

    Attributes:
        choices: where steps show the size: of each number of rows, of each shape that a row has.
    """

    def __init__(self, size: int | Literal["auto"], shifts: bool) -> None:
        self._size, self._shifts = size, shifts
        self.choices: dict[tuple[Hashable, int], SizeChoice] = {}

    def parts(self, batches: Sequence[Any]) -> tuple[list[Part], SizeChoice | None]:
        """Return the micro-batches of what a step is given, and the choice that their size is of, if it is one.

        Raises:
            InputError: a batch that is no container of tensors, or whose tensors have several numbers of rows.
        """
        rows = [_rows(batch) for batch in batches]
        choice: SizeChoice | None = None
        size = self._size
        if size == "auto":
            row = structure_of(_cut(batches[0], rows[0], 0, 1), [])
            choice = self.choices.get((row, sum(rows)))
            if choice is None:
                choice = self.choices[row, sum(rows)] = self._choice(row, max(rows))
            size = choice.size
        found = [
            Part(part.batch, part.divisor * len(batches))
            for batch, count in zip(batches, rows, strict=True)
            for part in self._parts_of(batch, count, size)
        ]
        return found, choice

    def _choice(self, row: Hashable, rows: int) -> SizeChoice:
        """Return a choice for a number of rows, which begins where one for another number has ended."""
        sizes = _sizes(rows)
        known = [each for (shape, _), each in self.choices.items() if shape == row and each.is_settled]
        if not known:
            return SizeChoice(sizes)
        last = max(known, key=lambda each: (each.is_limited, each.size))
        place = max(place for place, size in enumerate(sizes) if size <= last.size)
        return SizeChoice(sizes, place, is_settled=last.is_limited or rows < last.size, is_limited=last.is_limited)

    def _parts_of(self, batch: Any, rows: int, size: int) -> list[Part]:
        """Return the parts of one batch; one in which no label counts is left out."""
        counts = _labels(batch, rows, self._shifts)
        begins = range(0, rows, size)
        if len(begins) < 2:
            return [Part(batch, 1.0)]
        weights = [sum(counts[begin : begin + size]) for begin in begins]
        total = sum(weights)
        if not total:  # its loss is what the model makes of none
            return [Part(batch, 1.0)]
        return [
            Part(_cut(batch, rows, begin, size), total / weight)
            for begin, weight in zip(begins, weights, strict=True)
            if weight
        ]


def _sizes(rows: int) -> list[int]:
    """Return sizes that divide a number of rows, each at least twice the one before."""
    sizes: list[int] = []
    for size in range(1, rows + 1):
        if rows % size == 0 and (not sizes or size >= 2 * sizes[-1]):
            sizes.append(size)
    return sizes or [1]


def _rows(batch: Any) -> int:
    """Return the rows of a batch: the extent of its tensors along their first axis, but for those that all rows share.

    Raises:
        InputError: there is no such number.
    """
    tensors: list[Tensor] = []
    try:
        structure_of(batch, tensors)
    except UnknownBatchError as error:
        raise InputError(
            f"micro_batch goes with batches of tensors, in mappings, lists or tuples, and {error}"
        ) from None
    rows = sorted({tensor.shape[0] for tensor in tensors if tensor.dim() and tensor.shape[0] != 1})
    if len(rows) > 1:
        raise InputError(
            f"micro_batch takes batches apart along the first axis, where the tensors of this one have "
            f"{' and '.join(map(str, rows))} rows: give its micro-batches yourself, step(first, second)"
        )
    return rows[0] if rows else 1


def _cut(given: Any, rows: int, begin: int, size: int) -> Any:
    """Return some rows of a batch; tensors of one row, and all else, are shared."""
    if isinstance(given, Tensor):
        return given[begin : begin + size] if given.dim() and given.shape[0] == rows else given
    if isinstance(given, Mapping):
        return {key: _cut(value, rows, begin, size) for key, value in given.items()}
    if isinstance(given, list | tuple):
        values = [_cut(value, rows, begin, size) for value in given]
        return type(given)(*values) if hasattr(given, "_fields") else type(given)(values)
    return given


def _labels(batch: Any, rows: int, shifts: bool) -> list[int]:
    """Return how many labels of each row count in the loss; 1 for each, where a batch has no `labels` of integers."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.dim() or labels.shape[0] != rows:
        return [1] * rows
    counts = labels.flatten(1)[:, int(shifts) :] if labels.dim() > 1 else labels[:, None]
    found: list[int] = (counts != IGNORED).sum(dim=1, dtype=torch.int64).tolist()
    return found
