"""Batches by name, as collate functions of transformers make them: their axes, and the same batch with padding."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from autotuner.runtime.batches import CONSTANTS, IGNORED

Kind = Literal["tokens", "mask", "types", "positions", "labels"]
Extents = tuple[int, ...]
"""Extents of a batch: its sequences, then the lengths of its tensors, each length that differs once."""
Shape = tuple[Extents, ...]
"""Extents of each micro-batch of a step."""

KINDS: dict[str, Kind] = {
    "input_ids": "tokens",
    "decoder_input_ids": "tokens",
    "attention_mask": "mask",
    "decoder_attention_mask": "mask",
    "token_type_ids": "types",
    "position_ids": "positions",
    "label": "labels",
    "labels": "labels",
    "label_ids": "labels",
    "next_sentence_label": "labels",
}
"""Names of tensors that can be padded. Of any other tensor it is not known which value says nothing."""


class NotPaddedError(Exception):
    """A call is not padded; the message says why."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a batch.

    Args:
        axes: number of the extent of each axis: 0 for sequences, then 1 or more for a length.
    """

    name: str
    kind: Kind
    axes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class BatchForm:
    """All of a batch but its extents and the elements of its tensors.

    Args:
        entries: its tensors, in order.
        constants: name and value of all else, in order.
    """

    entries: tuple[Entry, ...]
    constants: tuple[tuple[str, Any], ...]

    @property
    def has_mask(self) -> bool:
        return any(entry.kind == "mask" for entry in self.entries)

    def padded(self, batch: Mapping[str, Any], extents: Extents, token: int) -> dict[str, Any]:
        """Return a batch of this form with padding: more columns at the right, and more rows at the end.

        Nothing of the padding has a label. Masks hide new columns. They hide nothing of new rows: a token that sees
        nothing may have a softmax that is no number.

        Args:
            batch: of this form; tensors of (sequences,) or (sequences, length).
            extents: of the batch that is returned, each at least as large.
            token: the number of the token that stands for padding.
        """
        made = dict(batch)
        for entry in self.entries:
            tensor: Tensor = batch[entry.name]
            more = [extents[axis] - size for axis, size in zip(entry.axes, tensor.shape, strict=True)]
            pads = [each for added in reversed(more) for each in (0, added)]  # the last axis first
            grown = functional.pad(tensor, pads, value=_fill(entry, token))
            if entry.kind == "mask" and more[0]:
                grown[tensor.shape[0] :] = 1
            made[entry.name] = grown
        return made


def _fill(entry: Entry, token: int) -> int:
    if entry.kind == "tokens":
        return token
    is_number_of_a_class = entry.kind == "labels" and not entry.dtype.is_floating_point
    return IGNORED if is_number_of_a_class else 0


def read(batch: Any) -> tuple[BatchForm, Extents]:
    """Return form and extents of a batch.

    Raises:
        NotPaddedError: it is no mapping by name, or holds a tensor of which nobody knows how it is padded.
    """
    if not isinstance(batch, Mapping):
        raise NotPaddedError(f"a batch is a {type(batch).__name__}: only names of a mapping say what can be padded")
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or 0 in ids.shape:
        raise NotPaddedError("a batch has no input_ids of (sequences, length)")
    extents = list(ids.shape)
    entries, constants = [], []
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            if not isinstance(value, CONSTANTS):
                raise NotPaddedError(f"a batch holds {name!r}, a {type(value).__name__}")
            constants.append((name, value))
        elif value.dim():
            entries.append(_entry(name, value, extents))
        else:
            constants.append((name, value.dtype))
    found = BatchForm(tuple(entries), tuple(constants))
    if not found.has_mask and any(entry.kind == "positions" for entry in entries):
        raise NotPaddedError("position_ids without an attention_mask may keep several sequences of a row apart")
    return found, tuple(extents)


def _entry(name: str, tensor: Tensor, extents: list[int]) -> Entry:
    """Return what is known of a tensor, and append its length to the extents where it is another one."""
    kind = KINDS.get(name)
    if kind is None:
        raise NotPaddedError(f"a batch holds {name!r}, and it is not known how that is padded")
    if tensor.dim() > 2 or (tensor.dim() == 1 and kind != "labels"):
        raise NotPaddedError(f"{name} has {tensor.dim()} axes: it is not known how that is padded")
    if tensor.shape[0] != extents[0]:
        raise NotPaddedError(f"{name} has {tensor.shape[0]} rows, and input_ids {extents[0]}")
    if tensor.dim() == 1:
        return Entry(name, kind, (0,), tensor.dtype)
    if tensor.shape[1] not in extents[1:]:
        extents.append(tensor.shape[1])
    return Entry(name, kind, (0, extents.index(tensor.shape[1], 1)), tensor.dtype)


def is_right_padded(batch: Mapping[str, Any], form: BatchForm) -> bool:
    """Say whether all that masks hide is at the right end of rows; this waits for a batch that is on a device."""
    masks = (batch[entry.name].to(torch.float32) for entry in form.entries if entry.kind == "mask")
    return all(bool((mask[:, 1:] <= mask[:, :-1]).all()) for mask in masks)


def tokens_in(shape: Shape) -> int:
    """Return how many places for tokens the batches of a step have."""
    return sum(extents[0] * sum(extents[1:]) for extents in shape)


def holds(larger: Shape, smaller: Shape) -> bool:
    """Say whether batches of a shape can be padded to another one; both are of one form."""
    return all(a >= b for one, other in zip(larger, smaller, strict=True) for a, b in zip(one, other, strict=True))
