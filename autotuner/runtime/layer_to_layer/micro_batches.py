"""Batches split into micro-batches along their first axis, of a size as given, or as the first steps have shown.

A layer's work is the same for few large micro-batches and for many small ones. Large ones need fewer calls from Python
and larger kernels, and more memory. Which is fastest is measured by training steps, each of which counts as one: of a
small size, then of twice that, as long as it pays and has room.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from autotuner.errors import BudgetError, InputError
from autotuner.runtime.batches import UnknownBatchError, structure_of
from autotuner.runtime.layer_to_layer.times import LayerTimes
from autotuner.runtime.loss_items import LossItems, shares

OF_ROWS = LossItems("this step", None)

TIMED = 2
"""Steps of a size that are timed, behind a first one that compiles."""
PAYS = 0.02
"""Of the time of a step, that a larger size has to save."""
SHAPES_MAX = 64
"""Of a layer that are compiled, where sizes are tried; torch's own limit is 8."""
MOST = 64
"""Micro-batches of the first step, about."""
FIRST = ("input_ids", "inputs_embeds", "labels")
"""Names of tensors that say how many rows there are, where a batch has one."""
RowShape = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Of a row of each tensor that has rows."""
KEPT = 256
"""Shapes whose sizes are kept."""


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

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
        candidates: sizes, from the smallest on.
        place: of the size that the next step has.
        is_settled: whether no other size is tried.
        is_limited: whether that is so because a larger one has no room: so it is with more rows, too.

    Attributes:
        seconds: of a step, for each size that was tried: the least of two.
    """

    candidates: Sequence[int]
    place: int = 0
    is_settled: bool = False
    is_limited: bool = False
    seconds: dict[int, float] = field(default_factory=dict)
    _timed: list[float] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Rows of the next step's micro-batches."""
        return self.candidates[self.place]

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
        self.seconds[self.size] = least = min(self._timed[1:])
        self._timed.clear()
        before = self.seconds.get(self.candidates[self.place - 1]) if self.place else None
        pays = before is None or least < (1 - PAYS) * before
        larger = self.candidates[self.place + 1 :][:1]
        fits = not larger or has_room(self.size, larger[0])
        if pays and times.is_computing and larger and fits:
            self.place += 1
            return
        fastest = min(self.seconds.values())
        near = min(size for size, seconds in self.seconds.items() if (1 - PAYS) * seconds <= fastest)
        self.place, self.is_settled, self.is_limited = self.candidates.index(near), True, not fits

    def go_back(self) -> bool:
        """Take the next smaller size for good, since this one failed, and say whether there is one."""
        if not self.place:
            return False
        self.place -= 1
        self.is_settled = self.is_limited = True
        return True

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Run a step of this size: later ones are smaller if memory does not suffice. Layers may have many shapes."""
        try:
            with of_many_sizes():
                yield
        except torch.OutOfMemoryError:
            self.go_back()
            raise
        except BudgetError:  # behind a step that has run
            if not self.go_back():
                raise

    def __str__(self) -> str:
        tried = ", ".join(f"{size}: {1e3 * seconds:,.0f} ms" for size, seconds in self.seconds.items())
        said = f"micro-batches of {self.size}" + ("" if self.is_settled else ", which is being tried")
        return said + (f" (a step with each size, {tried})" if tried else "")


class MicroBatches:
    """Splits batches.

    Args:
        size: rows of a micro-batch; "auto" for what steps show; None where batches are the micro-batches.
        items: of a micro-batch's loss: by rows, or as a function of the micro-batch.

    Attributes:
        choices: where steps show the size: for each shape that rows have, and numbers of rows.
        last: the choice of the last step.
    """

    def __init__(self, size: int | Literal["auto"] | None, items: LossItems | Callable[[Any], float] = OF_ROWS) -> None:
        self.size, self._items = size, items
        self.choices: dict[tuple[RowShape, tuple[int, ...]], SizeChoice] = {}
        self.last: SizeChoice | None = None

    def split(self, batches: Sequence[Any]) -> list[MicroBatch]:
        """Return the micro-batches of what a step is given.

        Raises:
            InputError: a batch that is no container of tensors, or whose rows are not known.
        """
        size = self.size
        if size is None:
            return [MicroBatch(batch, len(batches)) for batch in batches]
        splits = [_Split.of(batch) for batch in batches]
        if size == "auto":
            self.last = self._choice(splits)
            size = self.last.size
        return [
            MicroBatch(each.batch, each.divisor * len(batches))
            for split in splits
            for each in self._parts_of(split, size)
        ]

    def _choice(self, splits: Sequence["_Split"]) -> SizeChoice:
        """Return the choice for such batches; a new one begins where one for others has ended."""
        rows = tuple(split.rows for split in splits)
        shape = splits[0].shape
        found = self.choices.get((shape, rows))
        if found is None:
            if len(self.choices) >= KEPT:
                self.choices.pop(next(iter(self.choices)))
            found = self.choices[shape, rows] = self._new(shape, max(rows))
        return found

    def _new(self, shape: RowShape, rows: int) -> SizeChoice:
        candidates = [1 << power for power in range(rows.bit_length()) if 1 << power < rows] + [rows]
        settled = [(key[0], choice) for key, choice in self.choices.items() if choice.is_settled]
        alike = [choice for of, choice in settled if of == shape]
        if alike:
            limited = [choice for choice in alike if choice.is_limited]
            last = max(limited or alike, key=lambda choice: choice.size)
            place = max(place for place, size in enumerate(candidates) if size <= max(1, last.size))
            return SizeChoice(
                candidates, place, is_settled=last.is_limited or rows <= last.size, is_limited=last.is_limited
            )
        # Rows of other lengths: attention may need memory by their square.
        own = max(1, _elements(shape))
        begins = [int(choice.size * min(1.0, _elements(of) / own) ** 2) for of, choice in settled]
        begin = max(1, max(begins, default=rows // MOST))
        return SizeChoice(candidates, max(place for place, size in enumerate(candidates) if size <= begin))

    def _parts_of(self, split: "_Split", size: int) -> list[MicroBatch]:
        """Return the parts of one batch; one of which nothing counts in the loss is left out."""
        begins = range(0, split.rows, size)
        if len(begins) < 2:
            return [MicroBatch(split.batch, 1.0)]
        parts = [split.part(begin, size) for begin in begins]
        divisors: Sequence[float | None]
        if isinstance(split.batch, Mapping) and split.batch.get("num_items_in_batch") is not None:
            divisors = [1.0] * len(parts)  # what transformers divides sums by
        elif isinstance(self._items, LossItems):
            of_rows = self._items.of_rows(split.batch, split.rows)
            divisors = shares([sum(of_rows[begin : begin + size]) for begin in begins])
        else:
            divisors = shares([float(self._items(part)) for part in parts])
        return [MicroBatch(part, divisor) for part, divisor in zip(parts, divisors, strict=True) if divisor is not None]


@dataclass(frozen=True)
class _Split:
    """A batch, and its rows.

    Args:
        batch: as it was given.
        rows: the extent of its tensors along the first axis.
        shape: of the rows of each tensor that has them, with its type.
    """

    batch: Any
    rows: int
    shape: RowShape

    @classmethod
    def of(cls, batch: Any) -> "_Split":
        """Find out the rows of a batch: those of its tokens or labels, or of its first tensor.

        Raises:
            InputError: it is no container of tensors, or they have different numbers of rows.
        """
        try:
            structure_of(batch, [])
        except UnknownBatchError as error:
            raise InputError(
                f"micro_batch_size goes with batches of tensors, in mappings, lists or tuples, and {error}"
            ) from None
        named = dict(_named(batch))
        tensors = {name: each for name, each in named.items() if isinstance(each, Tensor) and each.dim()}
        first = next((name for name in (*FIRST, *tensors) if name in tensors), None)
        rows = 1 if first is None else int(tensors[first].shape[0])
        if rows == 1:
            return cls(batch, 1, ())
        own = {name: each for name, each in tensors.items() if each.shape[0] == rows}
        for name, each in named.items():
            reason = _refused(name, each, rows)
            if reason:
                raise InputError(
                    f"micro_batch_size splits batches by rows, of which {first} has {rows}, and {reason}: give "
                    "micro-batches yourself, step(first, second)"
                )
        return cls(batch, rows, tuple((tuple(each.shape[1:]), each.dtype) for each in own.values()))

    def part(self, begin: int, size: int) -> Any:
        """Return some rows; tensors of one row, and all else, are shared."""
        return _cut(self.batch, self.rows, begin, size)


def of_many_sizes() -> AbstractContextManager[None]:
    """Let torch compile a function for as many sizes as are tried inside."""
    config = torch._dynamo.config
    found: AbstractContextManager[None] = config.patch(recompile_limit=max(SHAPES_MAX, config.recompile_limit))
    return found


def _refused(name: str, given: Any, rows: int) -> str:
    """Say why something of a batch has no rows that it can be split into, or "" where it has some, or all share it."""
    if isinstance(given, list | tuple):
        return f"{name} is a list of {len(given)}" if len(given) == rows else ""
    if not isinstance(given, Tensor) or not given.dim() or given.shape[0] == 1:
        return ""
    if given.shape[0] != rows:
        return f"{name} has {given.shape[0]} (one that all rows share is given as 1 row)"
    is_planes = name.endswith("position_ids") and given.dim() == 3  # of each axis of an image, as in Qwen2-VL
    return f"{name} has three axes, of which the first one may be no rows" if is_planes else ""


def _named(given: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield tensors of a batch, and lists within it that are not of tensors with axes, by name."""
    if isinstance(given, Tensor):
        yield name or "the batch", given
    elif isinstance(given, Mapping):
        for key, value in given.items():
            yield from _named(value, f"{name}.{key}" if name else str(key))
    elif isinstance(given, list | tuple):
        if name and not all(isinstance(each, Tensor) and each.dim() for each in given):
            yield name, given
        for place, value in enumerate(given):
            yield from _named(value, f"{name or 'tensor '}[{place}]")


def _cut(given: Any, rows: int, begin: int, size: int) -> Any:
    if isinstance(given, Tensor):
        return given[begin : begin + size] if given.dim() and given.shape[0] == rows else given
    if isinstance(given, Mapping):
        return {key: _cut(value, rows, begin, size) for key, value in given.items()}
    if isinstance(given, list | tuple):
        values = [_cut(value, rows, begin, size) for value in given]
        return type(given)(*values) if hasattr(given, "_fields") else type(given)(values)
    return given


def _elements(shape: RowShape) -> int:
    return sum(prod(extents) for extents, _ in shape)
