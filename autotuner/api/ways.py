"""Ways to batch sequences of many lengths, compared by training steps that run: padded, in few lengths, or packed."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from autotuner.api.comparing import as_before
from autotuner.api.length_batches import LengthBatches
from autotuner.api.packed_batches import PackedBatches
from autotuner.api.packing import packed, unpacked_again
from autotuner.api.training import training_step
from autotuner.errors import InputError
from autotuner.plan.phrases import binary
from autotuner.runtime.batches import IGNORED
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.packing.interface import attention_of
from autotuner.runtime.processes import are_several

WARM, TIMED = 4, 10
"""Steps of each shape before they are timed, and that are timed at least."""
PACKED_BATCHES = 4
"""Packed batches that are timed: their attention depends on their sequences."""

BatchOf = Callable[[Sequence[int], int], Any]
"""Makes a padded batch of sequences of some lengths, padded to one."""


@dataclass(frozen=True)
class WayRow:
    """A way to batch, and what an epoch takes.

    Args:
        name: of the way.
        sampler: yields its batches.
        shapes: how many there are, each compiled and tuned by itself.
        steps: of an epoch.
        filled: share of the tokens in batches that are no padding.
        epoch_s: predicted seconds of an epoch; None where it cannot run.
        per_second: tokens that are no padding, a second; 0 where it cannot run.
        peak_bytes: allocated at most while its steps ran; above what was there before where the device keeps no count.
        note: why it cannot run; "" where it can.
    """

    name: str
    sampler: LengthBatches | PackedBatches | None
    shapes: int = 0
    steps: int = 0
    filled: float = 0.0
    epoch_s: float | None = None
    per_second: float = 0.0
    peak_bytes: int = 0
    note: str = ""

    def __str__(self) -> str:
        if self.epoch_s is None:
            return f"{self.name}: {self.note}"
        return (
            f"{self.name}: {self.per_second:,.0f} tokens a second that are no padding; an epoch takes {self.steps:,} "
            f"steps and {self.epoch_s:,.1f} s, {self.filled:.0%} filled, {self.shapes} shape{'s' * (self.shapes > 1)}, "
            f"{binary(self.peak_bytes)}"
        )


@dataclass(frozen=True)
class WayComparison:
    """Ways to batch one dataset; `str` gives a line for each.

    Args:
        rows: a row for each way.
    """

    rows: tuple[WayRow, ...]

    @property
    def best(self) -> WayRow | None:
        """The way of most tokens a second; None where none can run."""
        return max((row for row in self.rows if row.epoch_s is not None), key=lambda row: row.per_second, default=None)

    def __str__(self) -> str:
        return "\n".join(f"{row}{', the most' if row is self.best else ''}" for row in self.rows)


def compare_ways(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lengths: Sequence[int],
    batch_size: int,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    batch_of: BatchOf | None = None,
    sizes: int = 4,
    multiple: int = 8,
    tunes: bool = True,
    **options: Any,
) -> WayComparison:
    """Run training steps of each shape that a way of batching needs, and predict an epoch of a dataset from them.

    The ways: all sequences padded to the longest; padded to a few lengths, as `autotuner.batches` does; packed, as
    `autotuner.packed` and `packed_batches` do, in batches of as many tokens as the first way has places. Behind it,
    parameters, buffers and the optimizer's state are what they were.

    Args:
        model: as of `training_step`; so are optimizer and loss.
        lengths: of all sequences of the dataset, in tokens.
        batch_size: sequences of a padded batch.
        batch_of: makes a padded batch of some lengths, padded to one length, on any device; by default made-up
            `input_ids`, `attention_mask` and `labels` for a model of transformers.
        sizes, multiple: as of `autotuner.batches`.
        tunes: whether each shape is tuned, unless the database knows it; minutes each.
        options: further ones of `training_step`, such as `database`, `limits` and `max_norm`.

    Returns:
        A row for each way, with the sampler that does it.

    Raises:
        InputError: lengths or numbers that `autotuner.batches` refuses, several processes, or what `training_step`
            refuses; no `batch_of` for a model without a vocabulary.
    """
    if are_several():
        raise InputError("compare_ways measures in one process: call it before the others start")
    make = made_up_batches(model) if batch_of is None else batch_of
    few = LengthBatches(lengths, batch_size, sizes=sizes, multiple=multiple)
    one = LengthBatches(lengths, batch_size, sizes=1, multiple=multiple, window=1)
    steps = _Steps(model, optimizer, loss, tunes, options)
    with as_before(model, optimizer):
        found = [_padded("padded to the longest", one, batch_size, make, steps)]
        if few.padded_lengths != one.padded_lengths:
            found.append(_padded(f"padded to {len(few.padded_lengths)} lengths", few, batch_size, make, steps))
        found.append(_packed(model, lengths, batch_size * one.padded_lengths[-1], make, steps))
    return WayComparison(tuple(found))


def made_up_batches(model: nn.Module) -> BatchOf:
    """Return what makes padded batches for a model of transformers.

    Raises:
        InputError: nothing says how many words it knows.
    """
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(words, int):
        raise InputError(f"{type(model).__name__} does not say how many words it knows: give batch_of")

    def make(lengths: Sequence[int], width: int) -> dict[str, Tensor]:
        ids = torch.randint(1, words, (len(lengths), width), generator=torch.Generator().manual_seed(sum(lengths)))
        mask = torch.arange(width) < torch.tensor(lengths)[:, None]
        return {
            "input_ids": ids * mask, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, IGNORED)
        }  # fmt: skip

    return make


class _Steps:
    """Training steps that are timed.

    Args:
        tunes: whether shapes are tuned.
        options: of `training_step`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any], Tensor] | None,
        tunes: bool,
        options: Mapping[str, Any],
    ) -> None:
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._tunes, self._options = tunes, {**options, "pad_batches": False}
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def timed(self, batches: Sequence[Any]) -> tuple[float, int]:
        """Return the seconds of a step with batches of one shape, the mean of theirs, and bytes at most."""
        runtime = device_runtime(self.device)
        examples = {"example_inputs": batches[0]} if self._tunes else {}
        step = training_step(self._model, self._optimizer, self._loss, **{**examples, **self._options})
        meter = runtime.meter()
        try:
            for number in range(WARM):
                step(batches[number % len(batches)])
            seconds, rounds = [], -(-TIMED // len(batches))
            for batch in batches:
                times = []
                for _ in range(rounds):
                    began = runtime.mark()
                    step(batch)
                    times.append((began, runtime.mark()))
                seconds.append(median(runtime.elapsed_us(*each) for each in times) / 1e6)
        finally:
            laps, _ = meter.stop()
            step.close()
            del step
            gc.collect()
        return sum(seconds) / len(seconds), max(laps)


def _padded(name: str, sampler: LengthBatches, batch_size: int, make: BatchOf, steps: _Steps) -> WayRow:
    """Return an epoch of padded batches: the time of each padded length, as often as it comes."""
    counts: dict[tuple[int, int], int] = {}
    batches: dict[tuple[int, int], list[int]] = {}
    tokens = 0
    for numbers in sampler:
        own = sampler.lengths_of(numbers)
        shape = len(own), sampler.padded_length(numbers)
        counts[shape] = counts.get(shape, 0) + 1
        batches.setdefault(shape, own)
        tokens += sum(own)
    seconds, peak = 0.0, 0
    for shape, count in sorted(counts.items()):
        try:
            each, peak_bytes = steps.timed([make(batches[shape], shape[1])])
        except torch.OutOfMemoryError:
            return WayRow(name, sampler, note=f"{batch_size} x {shape[1]} does not fit on the device")
        seconds, peak = seconds + count * each, max(peak, peak_bytes)
    places = sum(rows * length * count for (rows, length), count in counts.items())
    return WayRow(
        name, sampler, len(counts), sum(counts.values()), tokens / places, seconds, tokens / seconds, peak
    )  # fmt: skip


def _packed(model: nn.Module, lengths: Sequence[int], slots: int, make: BatchOf, steps: _Steps) -> WayRow:
    """Return an epoch of packed batches."""
    name = f"packed into {slots:,} tokens"
    try:
        sampler = PackedBatches(lengths, slots)
        before, packer = attention_of(model), packed(model, tokens=slots)
    except InputError as error:
        return WayRow(name, None, note=str(error))
    try:
        all_numbers = list(sampler)
        first = [sampler.lengths_of(numbers) for numbers in all_numbers[:PACKED_BATCHES]]
        batches = [_on(packer(_on(make(own, max(own)), torch.device("cpu"))), steps.device) for own in first]
        each, peak = steps.timed(batches)
    except torch.OutOfMemoryError:
        return WayRow(name, sampler, note=f"{slots:,} tokens do not fit on the device")
    except InputError as error:
        return WayRow(name, sampler, note=str(error))
    finally:
        unpacked_again(model, before)
    seconds, tokens = each * len(all_numbers), sum(sum(sampler.lengths_of(numbers)) for numbers in all_numbers)
    return WayRow(
        name, sampler, 1, len(all_numbers), tokens / (slots * len(all_numbers)), seconds, tokens / seconds, peak
    )  # fmt: skip


def _on(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}
