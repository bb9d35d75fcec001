"""Padded batches, or lists of examples, as packed ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.errors import InputError
from autotuner.runtime.batches import IGNORED
from autotuner.runtime.packing.bounds import bounds_of, mask_of

PER_TOKEN = ("input_ids", "inputs_embeds")
"""One of these says how many tokens a batch has."""


class Packer:
    """Packs batches for a model that is told, by bounds, which tokens see each other.

    An instance is a collate function: of a `DataLoader`, or of transformers' `Trainer`.

    Args:
        multiple: the number of tokens is one of this number.
        tokens: the number of tokens of each batch; None for as few as there are.
        shifted: the model shifts labels: the loss of a token is that of the next one's label. None where that is not
            known.
        first: the position of a sequence's first token.
    """

    def __init__(self, multiple: int, tokens: int | None, shifted: bool | None, first: int) -> None:
        self.multiple, self.tokens, self.shifted, self.first = multiple, tokens, shifted, first

    def __call__(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return a batch of one row.

        Args:
            batch: a padded batch, a mapping of tensors (sequences, length, ...), whose `attention_mask` says which
                tokens there are: in each sequence, they come first; or a list of examples, mappings of tensors or lists
                with one entry for each token.

        Returns:
            The same names, of shape (1, tokens, ...), with `position_ids`, and bounds as `attention_mask`. Behind the
            last sequence come tokens 0, each a sequence of its own, without a label.

        Raises:
            InputError: something has no entry for each token; a sequence is not padded on the right; there are no
                tokens, or more than `tokens`; there are labels, and whether the model shifts them is not known.
        """
        given, lengths = _of_mapping(batch) if isinstance(batch, Mapping) else _of_examples(batch)
        count = sum(lengths)
        if not count:
            raise InputError("a batch to pack has no tokens")
        if self.shifted is None and "labels" in given:
            raise InputError(
                "whether the model's loss shifts labels was not found out: say packed(model, shifted_labels=...), or "
                "leave labels out"
            )
        counts_otherwise = self.first and "input_ids" in given and "position_ids" not in given
        if counts_otherwise and bool((given["input_ids"] == self.first - 1).any()):
            raise InputError(
                f"a token is {self.first - 1}, that of padding, whose position this model counts otherwise: give "
                "position_ids"
            )
        total = self._total(count)
        device = next(iter(given.values())).device
        own = [torch.arange(length, device=device) for length in lengths]
        positions = torch.cat([*own, torch.zeros(total - count, dtype=torch.int64, device=device)])
        packed = {name: _filled(tensor, total, IGNORED if "label" in name else 0) for name, tensor in given.items()}
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
    shape = tuple(main.shape[:2]) if isinstance(main, Tensor) else ()
    if len(shape) != 2:
        raise InputError(
            f"a padded batch has tensors of shape (sequences, length, ...); given: {_told(main)}; a list of examples "
            "may have lists"
        )
    positions = tensors.get("position_ids")
    if isinstance(positions, Tensor) and positions.shape == (1, shape[1]):
        tensors["position_ids"] = positions.expand(shape)
    mask = tensors.pop("attention_mask", torch.ones(shape, dtype=torch.bool, device=main.device))
    for name, each in (tensors | {"attention_mask": mask}).items():
        if not isinstance(each, Tensor) or tuple(each.shape[:2]) != shape:
            raise InputError(
                f"{name} of a batch to pack is {_told(each)}: a tensor with an entry for each token begins with "
                f"{list(shape)}"
            )
    is_there = mask.bool()
    if bool(((mask != 0) & (mask != 1)).any()) or bool((is_there[:, 1:] & ~is_there[:, :-1]).any()):
        raise InputError(
            "attention_mask is 1 for tokens and 0 for padding, which is behind the tokens of each sequence: pad on the "
            "right"
        )
    return {name: each[is_there] for name, each in tensors.items()}, is_there.sum(1).tolist()


def _told(given: Any) -> str:
    return str(list(given.shape)) if isinstance(given, Tensor) else type(given).__name__


def _of_examples(examples: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Tensor], list[int]]:
    """Return the tokens of examples, one behind the other, and their lengths."""
    if not isinstance(examples, Sequence) or not examples or not all(isinstance(each, Mapping) for each in examples):
        raise InputError("packed are a padded batch, as a mapping, or a list of examples, each a mapping")
    rows = [_of_example(each) for each in examples]
    if any(row.keys() != rows[0].keys() for row in rows):
        raise InputError(
            f"examples to pack have the same names; given: {'; '.join(', '.join(row) for row in rows[:2])}"
        )
    lengths = [len(next(iter(row.values()))) for row in rows]
    rows = [row for row, length in zip(rows, lengths, strict=True) if length]  # the type of an empty list is not known
    for name in rows[0] if rows else ():
        kinds = {(row[name].dtype, row[name].shape[1:]) for row in rows}
        if len(kinds) > 1 or (name == "input_ids" and rows[0][name].dim() != 1):
            told = "; ".join(f"{row[name].dtype} {list(row[name].shape)}" for row in rows[:2])
            raise InputError(
                f"{name} of examples to pack is of one type, and has one entry for each token; given: {told}"
            )
    return {name: torch.cat([row[name] for row in rows]) for name in (rows[0] if rows else ())}, lengths


def _of_example(example: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {}
    for name, each in example.items():
        try:
            if each is not None:
                tensors[name] = torch.as_tensor(each)
        except (TypeError, ValueError) as error:
            raise InputError(f"{name} of an example to pack is no list of numbers: {error}") from error
    lengths = {name: len(each) if each.dim() else 0 for name, each in tensors.items()}
    if not tensors or len(set(lengths.values())) != 1:
        told = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise InputError(f"all of an example has one entry for each token; given: {told or 'nothing'}")
    mask = tensors.pop("attention_mask", None)
    if mask is None:
        return tensors
    row, _ = _of_mapping({name: each[None] for name, each in (tensors | {"attention_mask": mask}).items()})
    return row


def _filled(tensor: Tensor, total: int, value: int) -> Tensor:
    """Return a tensor of one row for each token, with rows of a value behind them."""
    behind = tensor.new_full((total - tensor.shape[0], *tensor.shape[1:]), value)
    return torch.cat((tensor, behind))
