"""Padded batches, or lists of examples, as packed ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.errors import InputError
from autotuner.runtime.packing.bounds import bounds_of
from autotuner.runtime.packing.interface import mask_of

IGNORED = -100
"""The label of tokens that have no part in the loss."""
PER_TOKEN = ("input_ids", "inputs_embeds")


class Packer:
    """Packs batches for a model that is told, by bounds, which tokens see each other.

    An instance is a collate function: of a `DataLoader`, or of transformers' `Trainer`.

    Args:
        multiple: the number of tokens is one of this number.
        tokens: the number of tokens of each batch; None for as few as there are.
        shifted: the model shifts labels: the loss of a token is that of the next one's label.
        first: the position of a sequence's first token.
    """

    def __init__(self, multiple: int, tokens: int | None, shifted: bool, first: int) -> None:
        self.multiple, self.tokens, self.shifted, self.first = multiple, tokens, shifted, first

    def __call__(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return a batch of one row.

        Args:
            batch: a padded batch, a mapping of tensors (sequences, length, ...), whose `attention_mask` says which
                tokens there are; or a list of examples, mappings of tensors or lists with one entry for each token.

        Returns:
            The same names, of shape (1, tokens, ...), with `position_ids`, and bounds as `attention_mask`. Behind the
            last sequence come tokens 0, each a sequence of its own, without a label.

        Raises:
            InputError: something has no entry for each token; there are more tokens than `tokens`.
        """
        given, lengths = _of_mapping(batch) if isinstance(batch, Mapping) else _of_examples(batch)
        count = sum(lengths)
        total = self._total(count)
        device = next(iter(given.values())).device
        own = [torch.arange(length, device=device) for length in lengths]
        positions = torch.cat([*own, torch.zeros(total - count, dtype=torch.int64, device=device)])
        packed = {name: _filled(tensor, total, IGNORED if name == "labels" else 0) for name, tensor in given.items()}
        if self.shifted and "labels" in packed:
            packed["labels"][positions == 0] = IGNORED
        packed.setdefault("position_ids", positions + self.first)
        made = {name: tensor[None] for name, tensor in packed.items()}
        made["attention_mask"] = mask_of(bounds_of(positions))
        return made

    def _total(self, count: int) -> int:
        if self.tokens is None:
            return -(-count // self.multiple) * self.multiple
        if count > self.tokens:
            raise InputError(f"a batch has {count:,} tokens, and tokens={self.tokens:,}: give fewer sequences at once")
        return self.tokens

    def unpacked(self, output: Tensor, attention_mask: Tensor) -> Tensor:
        """Return what a model makes of each packed token where it is in the padded batch, and 0 elsewhere.

        Args:
            output: (1, tokens, ...).
            attention_mask: of the padded batch, (sequences, length).
        """
        is_there = attention_mask.to(device=output.device, dtype=torch.bool)
        made = output.new_zeros(*is_there.shape, *output.shape[2:])
        made[is_there] = output[0, : int(is_there.sum())]
        return made


def _of_mapping(batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[int]]:
    """Return the tokens of a padded batch, one sequence behind the other, and the lengths of the sequences."""
    tensors = {name: each for name, each in batch.items() if each is not None}
    main = next((tensors[name] for name in PER_TOKEN if name in tensors), None)
    if main is None:
        raise InputError(f"a batch to pack has {' or '.join(PER_TOKEN)}; given: {', '.join(tensors) or 'nothing'}")
    mask = tensors.pop("attention_mask", None)
    shape = tuple(main.shape[:2])
    is_there = torch.ones(shape, dtype=torch.bool, device=main.device) if mask is None else mask.bool()
    for name, each in (tensors | {"attention_mask": is_there}).items():
        if not isinstance(each, Tensor) or tuple(each.shape[:2]) != shape:
            told = list(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise InputError(
                f"{name} of a batch to pack is {told}: a tensor with an entry for each token begins with {list(shape)}"
            )
    return {name: each[is_there] for name, each in tensors.items()}, is_there.sum(1).tolist()


def _of_examples(examples: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Tensor], list[int]]:
    """Return the tokens of examples, one behind the other, and their lengths."""
    if not examples or not all(isinstance(each, Mapping) for each in examples):
        raise InputError("packed are a padded batch, as a mapping, or a list of examples, each a mapping")
    rows = [_of_example(each) for each in examples]
    if any(row.keys() != rows[0].keys() for row in rows):
        raise InputError(
            f"examples to pack have the same names; given: {'; '.join(', '.join(row) for row in rows[:2])}"
        )
    lengths = [len(next(iter(row.values()))) for row in rows]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}, lengths


def _of_example(example: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {name: torch.as_tensor(each) for name, each in example.items() if each is not None}
    lengths = {name: len(each) if each.dim() else 0 for name, each in tensors.items()}
    if not tensors or len(set(lengths.values())) != 1:
        told = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise InputError(f"all of an example has one entry for each token; given: {told or 'nothing'}")
    mask = tensors.pop("attention_mask", None)
    return tensors if mask is None else {name: each[mask.bool()] for name, each in tensors.items()}


def _filled(tensor: Tensor, total: int, value: int) -> Tensor:
    """Return a tensor of one row for each token, with rows of a value behind them."""
    behind = tensor.new_full((total - tensor.shape[0], *tensor.shape[1:]), value)
    return torch.cat((tensor, behind))
