"""Masks of attention that are known while a model is compiled: wholly, where they follow from shapes, or in part."""

from collections.abc import Collection, Sequence
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
_MOVES = frozenset(("to", "expand", "contiguous"))


class KnownMasks:
    """Tells what masks hide, of those that a graph computes."""

    def __init__(
        self, constants: Constants, later: Collection[fx.Node] = (), later_and_keys: Collection[fx.Node] = ()
    ) -> None:
        """Take what is constant, and inputs of which something is known, as those of a body.

        Args:
            later: that hide what comes later, and nothing else.
            later_and_keys: that hide what comes later, and some keys from all queries of a sequence.
        """
        self._constants, self._later, self._later_and_keys = constants, later, later_and_keys
        self._found: dict[fx.Node, tuple[bool, list[fx.Node]]] = {}

    def hides_nothing(self, mask: Any) -> bool:
        """Say whether a mask is a constant that is true everywhere."""
        value = self._value(mask)
        return value is not None and bool(value.all())

    def is_causal(self, mask: Any, where_zero: bool) -> bool:
        """Say whether a mask is a constant that hides what comes later, and nothing else.

        Args:
            where_zero: whether it hides where it is false.
        """
        if isinstance(mask, View) and not _is_as_it_comes(mask):
            return False
        value = self._value(mask)
        if value is not None:
            return value.ndim >= 2 and _is_triangle(value if where_zero else ~value)
        node = mask.tensor.node if isinstance(mask, View) and mask.tensor.computed is None else mask
        return where_zero and isinstance(node, fx.Node) and self.node_hides_later(node)

    def hides_later_and_keys(self, mask: Any) -> bool:
        """Say whether a mask hides what comes later, some keys from all queries of a sequence, and nothing else.

        So a decoder hides padding. It is boolean, and false where it hides. Nothing is said where Triton does not run:
        no kernel takes both there, so that two masks are a pass more than one.
        """
        if not isinstance(mask, View) or mask.tensor.computed is not None or not _is_as_it_comes(mask):
            return False
        node = mask.tensor.node
        return (
            node is not None
            and self.node_hides_later_and_keys(node)
            and device_runtime(node.meta[EXAMPLE].device).has_triton
        )

    def node_hides_later(self, node: fx.Node) -> bool:
        """Say whether a node makes a mask that hides what comes later, and nothing else."""
        return node in self._later or self._hides(node) == (True, [])

    def node_hides_later_and_keys(self, node: fx.Node) -> bool:
        """Say whether a node makes a mask of which `hides_later_and_keys` is true."""
        if node in self._later_and_keys:
            return True
        hides_later, others = self._hides(node)
        return hides_later and bool(others) and all(_is_of_keys(part) for part in others)

    def _hides(self, node: fx.Node) -> tuple[bool, list[fx.Node]]:
        """Say whether what is constant of a boolean mask hides what comes later and nothing else; and what is none.

        It is worked out once: all layers ask of the same mask.
        """
        if node not in self._found:
            self._found[node] = self._looked_at(node)
        return self._found[node]

    def _looked_at(self, node: fx.Node) -> tuple[bool, list[fx.Node]]:
        example = node.meta.get(EXAMPLE)
        if not isinstance(example, Tensor) or example.dtype != torch.bool or example.ndim < 2:
            return False, []
        joined, parts = _joined(node)
        if any(self._constants.is_changed(each) for each in (*joined, *parts)):
            return False, []
        compared = [part for part in parts if self._compares_places(part, example.shape[-2:])]
        values = {part: self._constants.value(part) for part in parts if part not in compared}
        constants = [value for value in values.values() if value is not None]
        others = [part for part, value in values.items() if value is None]
        if any(value.dtype != torch.bool for value in constants):
            return False, others
        if compared:
            return all(bool(value.all()) for value in constants), others
        if not constants:
            return False, others
        everything = constants[0].new_ones(example.shape[-2:])
        return _is_triangle(reduce(torch.logical_and, constants, everything)), others

    def _compares_places(self, node: fx.Node, shape: Sequence[int]) -> bool:
        """Say whether a node is true where a key comes no later than its query, by their places alone.

        So it is known of sequences for which the mask itself would be too large to compute here.

        Args:
            shape: queries and keys.
        """
        name, sides = name_of(node), [side for side in node.args[:2] if isinstance(side, fx.Node)]
        if name not in ("le", "ge") or len(sides) != 2:
            return False
        keys, queries = (self._constants.value(side) for side in (sides if name == "le" else sides[::-1]))
        if keys is None or queries is None or not keys.ndim or queries.ndim < 2:
            return False
        count = keys.numel()
        if {count} != {*shape, queries.numel(), keys.shape[-1], queries.shape[-2]}:
            return False
        key, query = keys.flatten(), queries.flatten()
        return bool((key <= query).all() and (query[:-1] < key[1:]).all())

    def _value(self, mask: Any) -> Tensor | None:
        """Return where a mask that is a constant hides nothing, as the node has it that it comes from.

        It is boolean, or additive and of 0 and -inf.
        """
        if isinstance(mask, View) and mask.tensor.computed is not None:
            return None
        node = mask.tensor.node if isinstance(mask, View) else mask
        value = self._constants.value(node) if isinstance(node, fx.Node) else None
        if value is None or value.dtype == torch.bool:
            return value
        shows = value == 0
        return shows if value.is_floating_point() and bool((shows | (value == -torch.inf)).all()) else None


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


def _is_triangle(shows: Tensor) -> bool:
    rows, columns = shows.shape[-2:]
    return bool(rows == columns and (shows == torch.ones_like(shows).tril()).all())


def _is_as_it_comes(view: View) -> bool:
    """Say whether the last two dimensions of a view are those of its tensor, and what is before them only repeated."""
    own = [whole(dim) for dim in view.tensor.dims]
    seen = [whole(dim) for dim in view.dims]
    return not view.fixed and len(own) >= 2 and len(seen) >= 2 and own[-2:] == seen[-2:]
