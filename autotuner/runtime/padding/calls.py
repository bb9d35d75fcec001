"""Calls of a training step with batches of changing shapes: each is padded, or runs as it is."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from autotuner.runtime.batches import UnknownBatchError, moved_to, structure_of
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.padding.batches import (
    BatchForm,
    Extents,
    NotPaddedError,
    Shape,
    is_right_padded,
    read,
    tokens_in,
)
from autotuner.runtime.padding.check import ORDINARY, OTHERS, PaddingCheck
from autotuner.runtime.padding.choice import PaddingChoice, ShapeTimes
from autotuner.runtime.padding.report import PaddingReport
from autotuner.runtime.padding.rules import padding_token
from autotuner.runtime.processes import are_several

REASONS = 64
"""So many reasons are told apart; calls for further ones are counted as one."""
STRUCTURES = 64
"""So many structures of batches are remembered: of those that cannot be padded, and of the others the latest."""


@dataclass(frozen=True, eq=False)
class FittedCall:
    """Batches of a call, as they run.

    Args:
        batches: with padding, or as they were given.
        times: of the shape that runs; None where it has none.
    """

    batches: tuple[Any, ...]
    times: ShapeTimes | None = None


@dataclass(eq=False)
class CallGroup:
    """Calls that differ in extents alone.

    Args:
        choice: of the shape that runs.
        refusals: by form of a batch and numbers of the axes that are padded, why that is not done: in general, and for
            batches whose padding of their own is not at the right; None where it is.
    """

    choice: PaddingChoice
    refusals: dict[Hashable, tuple[str | None, str | None]] = field(default_factory=dict)


class PaddedCalls:
    """Pads batches to shapes that are compiled, where that changes neither loss nor gradients, and pays."""

    def __init__(
        self, model: nn.Module, objective: Callable[[Any], Tensor], device: torch.device, ignores: bool = False,
        limit: int = 8, group: Any = None,
    ) -> None:  # fmt: skip
        """Prepare; nothing runs yet.

        Args:
            model: that is trained.
            objective: forward and loss of a batch, not compiled.
            device: of the model.
            ignores: whether the loss is known to leave out labels of -100; else a batch has to have one.
            limit: so many shapes are compiled, beside those that are larger than all before.
            group: of torch, whose processes train the model; all of them by default.
        """
        self._check = PaddingCheck(model, objective, padding_token(model), ignores)
        self._device, self._runtime, self._limit = device, device_runtime(device), limit
        self._processes = group
        self._groups: dict[Hashable, CallGroup] = {}
        self._structures: set[Hashable] = set()
        self._calls = self._padded = self._tokens = self._places = 0
        self._reasons: Counter[str] = Counter()

    @property
    def report(self) -> PaddingReport:
        """Counts of the calls so far."""
        shapes = sum(times.steps > 0 for group in self._groups.values() for times in group.choice.times.values())
        return PaddingReport(
            self._calls, self._padded, self._tokens, self._places, shapes, Counter(self._reasons)
        )  # fmt: skip

    def expect(self, batch: Any, modes: Hashable) -> None:
        """Take the shape of a batch as one that is tuned, before any batch of it has run."""
        try:
            form, extents = read(batch)
        except NotPaddedError:
            return
        self._group((form,), modes).choice.add((extents,))

    def fitted(self, batches: tuple[Any, ...], modes: Hashable) -> FittedCall:
        """Return the batches of a call as they should run.

        Args:
            batches: its micro-batches.
            modes: all else that a step is compiled for.
        """
        self._calls += 1
        try:
            read_batches = [read(batch) for batch in batches]
        except NotPaddedError as error:
            self._note_unknown(batches, str(error))
            return FittedCall(batches)
        forms, shape = tuple(form for form, _ in read_batches), tuple(extents for _, extents in read_batches)
        group = self._group(forms, modes)
        try:
            wanted = self._wanted(group, batches, forms, shape)
        except NotPaddedError as error:
            self._note(str(error))
            wanted = shape
        if wanted == shape:
            return FittedCall(batches, group.choice.add(shape))
        return self._padded_call(batches, forms, shape, wanted, group.choice.times[wanted])

    def _wanted(
        self, group: CallGroup, batches: tuple[Any, ...], forms: tuple[BatchForm, ...], shape: Shape
    ) -> Shape:  # fmt: skip
        """Return the shape in which a call runs: its own where no larger one is there, or none is faster.

        Raises:
            NotPaddedError: padding to any larger one changes values.
        """
        refusal: NotPaddedError | None = None
        for target in group.choice.targets(shape):
            try:
                self._require(group, batches, forms, shape, target)
            except NotPaddedError as error:
                refusal = refusal or error
                continue
            found = group.choice.shape_of(shape, target)
            self._require(group, batches, forms, shape, found)
            return found
        if refusal is not None:
            raise refusal
        return shape

    def _padded_call(
        self, batches: tuple[Any, ...], forms: tuple[BatchForm, ...], shape: Shape, wanted: Shape, times: ShapeTimes
    ) -> FittedCall:
        self._padded += 1
        self._tokens += tokens_in(shape)
        self._places += tokens_in(wanted)
        made = tuple(
            form.padded(moved_to(batch, self._device), extents, self._check.token)
            for batch, form, extents in zip(batches, forms, wanted, strict=True)
        )
        return FittedCall(made, times)

    @contextmanager
    def timed(self, call: FittedCall) -> Iterator[None]:
        """Take the time of a step, unless it fails."""
        began, began_s = self._runtime.mark(), perf_counter()
        yield
        if call.times is not None:
            call.times.keep(began, self._runtime.mark(), 1e6 * (perf_counter() - began_s))

    def _group(self, forms: tuple[BatchForm, ...], modes: Hashable) -> CallGroup:
        key = forms, modes
        found = self._groups.pop(key, None) or CallGroup(PaddingChoice(self._runtime.elapsed_us, self._limit))
        self._groups[key] = found
        if len(self._groups) > STRUCTURES:  # a number in a batch may be another one in each step
            del self._groups[next(iter(self._groups))]
        return found

    def _require(
        self, group: CallGroup, batches: tuple[Any, ...], forms: tuple[BatchForm, ...], shape: Shape, wanted: Shape
    ) -> None:
        """Check that padding changes nothing: a form and the axes that are padded once, in the modes of a group.

        Raises:
            NotPaddedError: it does, or nobody can tell.
        """
        for batch, form, given, extents in zip(batches, forms, shape, wanted, strict=True):
            axes = tuple(axis for axis, (a, b) in enumerate(zip(given, extents, strict=True)) if a != b)
            if axes:
                self._require_axes(group, batch, form, axes, (given, extents))

    def _require_axes(
        self, group: CallGroup, batch: Any, form: BatchForm, axes: tuple[int, ...], extents: tuple[Extents, Extents]
    ) -> None:
        if are_several(self._processes):
            raise NotPaddedError("several processes train one model, and each would decide by itself")
        key = form, axes
        if key not in group.refusals:
            ordinary = self._check.refusal(batch, form, *extents, ORDINARY if form.has_mask else ORDINARY[:1])
            needs_others = ordinary is None and form.has_mask
            others = self._check.refusal(batch, form, *extents, OTHERS) if needs_others else None
            group.refusals[key] = ordinary, others
        ordinary, others = group.refusals[key]
        if ordinary is not None:
            raise NotPaddedError(ordinary)
        if others is not None and not is_right_padded(batch, form):
            raise NotPaddedError(f"where rows have their own padding at the left, or within: {others}")

    def _note_unknown(self, batches: Sequence[Any], reason: str) -> None:
        """Count a call whose batches cannot be padded, unless all such calls had one structure."""
        try:
            structure = structure_of(batches, [])
        except UnknownBatchError:
            return
        if self._structures and structure not in self._structures:
            self._note(reason)
        if len(self._structures) < STRUCTURES:
            self._structures.add(structure)

    def _note(self, reason: str) -> None:
        self._reasons[reason if reason in self._reasons or len(self._reasons) < REASONS else "other reasons"] += 1
