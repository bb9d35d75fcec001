"""Masks of attention that are known while a model is compiled: wholly, where they follow from shapes, or in part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from autotuner.runtime.capture.axes import whole
from autotuner.runtime.capture.calls import EXAMPLE
from autotuner.runtime.capture.changed_in_place import name_of
from autotuner.runtime.capture.constants import Constants
from autotuner.runtime.capture.program import View
from autotuner.runtime.devices import device_runtime

_BOTH = frozenset(("and_", "__and__", "bitwise_and", "logical_and"))
_COMPARISONS = frozenset(("le", "lt", "ge", "gt"))
_MOVES = frozenset(("to", "expand", "contiguous"))


@dataclass(frozen=True, slots=True)
class Band:
    """A band of keys around that of each query: so many before it, and behind it, at most, beside its own."""

    before: int
    after: int

    def is_causal(self, places: int) -> bool:
        """Say whether it hides what comes later, and nothing else."""
        return self.after == 0 and self.before >= places - 1

    def __and__(self, other: "Band") -> "Band":
        return Band(min(self.before, other.before), min(self.after, other.after))


class KnownMasks:
    """Tells what masks hide, of those that a graph computes."""

    def __init__(
        self,
        constants: Constants,
        bands: Mapping[fx.Node, Band] | None = None,
        bands_and_keys: Mapping[fx.Node, Band] | None = None,
    ) -> None:
        """Take what is constant, and inputs of which something is known, as those of a body.

        Args:
            bands: masks that hide what is outside of a band, and nothing else.
            bands_and_keys: masks that hide what is outside of a band, and some keys from all queries of a sequence.
        """
        self._constants, self._bands, self._bands_and_keys = constants, bands or {}, bands_and_keys or {}
        self._found: dict[fx.Node, tuple[Band | None, list[fx.Node]]] = {}

    def hides_nothing(self, mask: Any) -> bool:
        """Say whether a mask is a constant that is true everywhere."""
        value = self._value(mask)
        return value is not None and bool(value.all())

    def band(self, mask: Any, where_zero: bool) -> Band | None:
        """Return the band that a mask leaves, if it is a constant that hides what is outside of one, and nothing else.

        Windows are known where Triton runs, whose attention skips what is outside of them; elsewhere, they are masks.

        Args:
            where_zero: whether it hides where it is false.
        """
        if isinstance(mask, View) and not _is_as_it_comes(mask):
            return None
        value = self._value(mask)
        node = mask.tensor.node if isinstance(mask, View) and mask.tensor.computed is None else mask
        if not isinstance(node, fx.Node):
            return None
        if value is not None:
            band = _band_of(value if where_zero else ~value)
        else:
            band = self.band_of_node(node) if where_zero else None
        return band if band and (band.is_causal(node.meta[EXAMPLE].shape[-1]) or _has_triton(node)) else None

    def band_beside_keys(self, mask: Any) -> Band | None:
        """Return the band that a mask leaves, if it hides that and some keys from all queries, and nothing else.

        So a decoder hides padding. It is boolean, and false where it hides. Nothing is said where Triton does not run:
        no kernel takes both there, so that two masks are a pass more than one.
        """
        if not isinstance(mask, View) or mask.tensor.computed is not None or not _is_as_it_comes(mask):
            return None
        node = mask.tensor.node
        return self.band_beside_keys_of_node(node) if node is not None and _has_triton(node) else None

    def condition(self, mask: Any) -> fx.Node | None:
        """Return the boolean tensor that is true where a mask is 0, and false where it is the lowest number."""
        node = mask.tensor.node if isinstance(mask, View) and mask.tensor.computed is None else None
        if node is None or name_of(node) != "where" or len(node.args) != 3 or self._constants.is_changed(node):
            return None
        shown, zero, lowest = node.args
        example, made = (each.meta.get(EXAMPLE) if isinstance(each, fx.Node) else None for each in (shown, node))
        if not isinstance(shown, fx.Node) or not isinstance(example, Tensor) or not isinstance(made, Tensor):
            return None
        is_zero = (self._constants.number(zero) if isinstance(zero, fx.Node) else zero) == 0
        is_alike = example.dtype == torch.bool and example.shape == made.shape and made.is_floating_point()
        return shown if is_alike and is_zero and lowest == torch.finfo(made.dtype).min else None

    def band_of_node(self, node: fx.Node) -> Band | None:
        """Return the band that a node leaves, if it makes a mask of which `band` knows one."""
        if node in self._bands:
            return None if self._constants.is_changed(node) else self._bands[node]
        band, others = self._hides(node)
        return None if others else band

    def band_beside_keys_of_node(self, node: fx.Node) -> Band | None:
        """Return the band that a node leaves, if it makes a mask of which `band_beside_keys` knows one."""
        if node in self._bands_and_keys:
            return None if self._constants.is_changed(node) else self._bands_and_keys[node]
        band, others = self._hides(node)
        return band if others and all(_is_of_keys(part) for part in others) else None

    def _hides(self, node: fx.Node) -> tuple[Band | None, list[fx.Node]]:
        """Return the band that what is constant of a boolean mask leaves, if it leaves one; and what is no constant.

        It is worked out once: all layers ask of the same mask.
        """
        if node not in self._found:
            self._found[node] = self._looked_at(node)
        return self._found[node]

    def _looked_at(self, node: fx.Node) -> tuple[Band | None, list[fx.Node]]:
        example = node.meta.get(EXAMPLE)
        if not isinstance(example, Tensor) or example.dtype != torch.bool or example.ndim < 2:
            return None, []
        joined, parts = _joined(node)
        if any(self._constants.is_changed(each) for each in (*joined, *parts)):
            return None, []
        compared = {part: self._band_by_places(part, example.shape[-2:]) for part in parts}
        values = {part: self._constants.value(part) for part in parts if compared[part] is None}
        constants = [value for value in values.values() if value is not None]
        others = [part for part, value in values.items() if value is None]
        if any(value.dtype != torch.bool for value in constants):
            return None, others
        bands: list[Band | None] = [band for band in compared.values() if band is not None]
        if not all(bool(value.all()) for value in constants):
            bands.append(_band_of(reduce(torch.logical_and, constants, constants[0].new_ones(example.shape[-2:]))))
        found = [band for band in bands if band is not None]
        return (reduce(Band.__and__, found) if found and len(found) == len(bands) else None), others

    def _band_by_places(self, node: fx.Node, shape: Sequence[int]) -> Band | None:
        """Return the band in which a node is true, where it compares the places of keys and queries.

        So it is known of sequences for which the mask itself would be too large to compute here.

        Args:
            shape: queries and keys.
        """
        name, sides = name_of(node), [side for side in node.args[:2] if isinstance(side, fx.Node)]
        if name not in _COMPARISONS or len(sides) != 2:
            return None
        one, other = (self._constants.value(side) for side in sides)
        if one is None or other is None or not one.ndim or not other.ndim:
            return None
        small, large = (one, other) if name in ("le", "lt") else (other, one)
        is_of_keys, count = [each.shape[-1] == each.numel() for each in (small, large)], small.numel()
        if {count} != {*shape, large.numel()} or count == 1 or sorted(is_of_keys) != [False, True]:
            return None
        keys, queries = (small, large) if is_of_keys[0] else (large, small)
        if queries.shape[-2] != count:
            return None
        key, query = keys.flatten().double(), queries.flatten().double()
        if not (key[:-1] < key[1:]).all():
            return None
        place, is_strict = torch.arange(count, device=key.device), name in ("lt", "gt")
        if is_of_keys[0]:  # each query sees the first keys
            seen = torch.searchsorted(key, query, right=not is_strict)
            band = Band(count - 1, int(seen[0]) - 1)
            fits = torch.equal(seen, (place + band.after + 1).clamp(max=count))
        else:  # each query sees the last keys
            first = torch.searchsorted(key, query, right=is_strict)
            band = Band(count - 1 - int(first[-1]), count - 1)
            fits = torch.equal(first, (place - band.before).clamp(min=0))
        return band if fits and min(band.before, band.after) >= 0 else None

    def _value(self, mask: Any) -> Tensor | None:
        """Return where a mask that is a constant hides nothing, as the node has it that it comes from.

        It is boolean, or additive and of 0 and -inf, or the lowest number, which hides as much beside a key that is
        seen.
        """
        if isinstance(mask, View) and mask.tensor.computed is not None:
            return None
        node = mask.tensor.node if isinstance(mask, View) else mask
        value = self._constants.value(node) if isinstance(node, fx.Node) else None
        if value is None or value.dtype == torch.bool:
            return value
        shows = value == 0
        if not value.is_floating_point():
            return None
        return shows if bool((shows | (value <= torch.finfo(value.dtype).min)).all()) else None


def _joined(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return nodes that are true together where a node is, behind those that join them."""
    joined, parts, waiting = list[fx.Node](), list[fx.Node](), [node]
    while waiting:
        each = waiting.pop()
        name, given = name_of(each), [side for side in each.args[:2] if isinstance(side, fx.Node)]
        if name in _BOTH and len(given) == 2:
            joined.append(each)
            waiting += given
        elif name in _MOVES and given and _is_alike(given[0], each):
            joined.append(each)
            waiting.append(given[0])
        else:
            parts.append(each)
    return joined, parts


def _is_alike(first: fx.Node, node: fx.Node) -> bool:
    """Say whether both are boolean, with the same last two dimensions."""
    one, other = first.meta.get(EXAMPLE), node.meta.get(EXAMPLE)
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or min(one.ndim, other.ndim) < 2:
        return False
    return one.dtype == other.dtype == torch.bool and one.shape[-2:] == other.shape[-2:]


def _is_of_keys(node: fx.Node) -> bool:
    """Say whether a boolean tensor is the same for all queries."""
    example = node.meta.get(EXAMPLE)
    if not isinstance(example, Tensor) or example.dtype != torch.bool or not example.ndim:
        return False
    return example.ndim == 1 or example.shape[-2] == 1


def _band_of(shows: Tensor) -> Band | None:
    """Return the band in which a tensor is true, and nowhere else, along its last two dimensions."""
    if shows.ndim < 2 or shows.shape[-2] != shows.shape[-1] or not shows.numel():
        return None
    first = shows.reshape(-1, *shows.shape[-2:])[0]
    band = Band(int(first[:, 0].sum()) - 1, int(first[0].sum()) - 1)
    if min(band.before, band.after) < 0:
        return None
    return band if bool((shows == torch.ones_like(first).tril(band.after).triu(-band.before)).all()) else None


def _has_triton(node: fx.Node) -> bool:
    return device_runtime(node.meta[EXAMPLE].device).has_triton


def _is_as_it_comes(view: View) -> bool:
    """Say whether the last two dimensions of a view are those of its tensor, and what is before them only repeated."""
    own = [whole(dim) for dim in view.tensor.dims]
    seen = [whole(dim) for dim in view.dims]
    return not view.fixed and len(own) >= 2 and len(seen) >= 2 and own[-2:] == seen[-2:]
