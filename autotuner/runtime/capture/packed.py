"""Attention over packed tokens in a graph: one operator, whose bounds are computed once for all layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autotuner.ir.packed_attention import BITS_OF_SEED, NUMBERS_PER_ROW
from autotuner.ir.records import Scalar
from autotuner.runtime.capture.axes import Axis, UnknownError, extent, fresh, whole
from autotuner.runtime.capture.calls import is_node
from autotuner.runtime.capture.constants import is_pure
from autotuner.runtime.capture.program import BoundView, Computed, Expression, TensorValue, View
from autotuner.runtime.capture.reader import Reader, memory, plain, rule
from autotuner.runtime.packing.bounds import seers_of
from autotuner.runtime.packing.operator import PACKED_ATTENTION

BOUNDS, SEED = 3, 4
"""Places among the operator's arguments."""


@rule(PACKED_ATTENTION)
def _packed_attention(
    reader: Reader,
    query: View,
    key: View,
    value: View,
    bounds: fx.Node,
    seed: Any,  # noqa: ARG001
    *given: Any,
) -> tuple[View, Expression]:
    """Append attention; its seed is drawn in the region, and the one that is given stays unread.

    Args:
        given: factor, dropped share, cap, and a relative bias or None.
    """
    factor, p, cap, bias = given
    rows = _single(query, 1, "rows")
    features = _single(query, 2, "features")
    heads = _single(query, 0, "heads")
    reader.axes.keep((rows, features, heads))
    operands: list[View | BoundView] = [query]
    shares = query if _extent(key, 0) == _extent(query, 0) else key  # whose heads those of keys and values are
    for each in (key, value):
        alike = [(shares.dims[0], each.dims[0]), *zip(query.dims[1:], each.dims[1:], strict=True)]
        renamed = [pair for one, other in alike for pair in reader.axes.unite(one, other)]
        reader.axes.keep((_single(each, 0, "heads"),))
        operands.append(BoundView(each, tuple(renamed)))
    operands.append(_bounds(reader, bounds, query))
    if p:
        drawn = fresh([BITS_OF_SEED])
        (mask,) = reader.make("dropout_mask", (), [whole(drawn[0])], {"p": 0.5}, query.dtype)
        operands.append(View(mask, drawn))
    if bias is not None:
        operands.append(_bias(reader, plain(bias, "packed attention's bias"), query))
    attributes: dict[str, Scalar | Axis] = {
        "row_axis": rows,
        "feature_axis": features,
        "factor": float(factor),
        "dropped": float(p),
        "cap": float(cap),
    }
    out, _ = reader.make("packed_attention", operands, [memory(query), [heads, rows]], attributes)
    return View(out, query.dims), Expression("log-sum-exp")


def _extent(view: View, place: int) -> int:
    return extent(whole(view.dims[place]))


def _single(view: View, place: int, what: str) -> Axis:
    """Return the only axis of a dimension.

    Raises:
        UnknownError: it has several, or none.
    """
    axes = whole(view.dims[place])
    if len(axes) != 1:
        raise UnknownError(f"packed attention whose {what} are {len(axes)} axes")
    return axes[0]


def _bias(reader: Reader, bias: View, query: View) -> BoundView:
    """Return a relative bias as an operand, (heads, distances) in any order of memory.

    Raises:
        UnknownError: it has one distance alone, or is no such tensor.
    """
    distances = _single(bias, 1, "distances")
    reader.axes.keep((distances,))
    renamed = reader.axes.unite(query.dims[0], bias.dims[0])
    if set(memory(bias)) != {*whole(bias.dims[0]), distances}:
        raise UnknownError("packed attention whose bias is a part of a tensor")
    return BoundView(bias, tuple(renamed))


def _bounds(reader: Reader, node: fx.Node, query: View) -> BoundView:
    """Return bounds as numbers; there is one tensor for all layers that read one node."""
    if node not in reader.numbers_of:
        rows = _extent(query, 1)
        source = TensorValue(fresh([rows, 2]), "int32", node)
        by = Computed(with_seers, (source,), ())
        dims = fresh([rows, NUMBERS_PER_ROW])
        reader.numbers_of[node] = View(TensorValue(dims, "float32", node, computed=by), dims)
    view = reader.numbers_of[node]
    return BoundView(view, tuple(reader.axes.unite(query.dims[1], view.dims[0])))


def with_seers(bounds: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bounds (rows, 2), and behind them which rows see each key (rows, 4)."""
    return torch.cat((bounds, seers_of(bounds)), 1).to(dtype)


def gather_bounds(graph: fx.Graph, is_changed: Callable[[fx.Node], bool]) -> None:
    """Have packed attention read the first of the nodes that compute equal bounds, right behind what these follow from.

    Each layer computes its bounds from those of the model, by numbers alone. Where a layer stands, its region could not
    stand before them.

    Args:
        is_changed: says whether a node changes in place, or is changed: such a one stays where it is.
    """
    alike: dict[Any, fx.Node] = {}

    def first(node: fx.Node) -> fx.Node:
        if not is_pure(node) or is_changed(node):
            return node
        args, kwargs = map_arg((node.args, node.kwargs), first)
        key = node.op, node.target, repr((args, kwargs))
        if key not in alike:
            given = [each for each in pytree.tree_leaves((args, kwargs), is_leaf=is_node) if is_node(each)]
            order = {each: place for place, each in enumerate(graph.nodes)}
            behind = max(given, key=order.__getitem__, default=inputs[-1] if inputs else None)
            if behind is not None:
                behind.append(node)
                node.args, node.kwargs = args, kwargs
            alike[key] = node
        return alike[key]

    inputs = graph.find_nodes(op="placeholder")
    for node in _calls(graph):
        node.update_arg(BOUNDS, first(node.args[BOUNDS]))  # type: ignore[arg-type]


def seeds_of(graph: fx.Graph) -> list[fx.Node]:
    """Return what draws the seeds of packed attention in a graph."""
    return [each for node in _calls(graph) for each in node.args[SEED : SEED + 1] if isinstance(each, fx.Node)]


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target is PACKED_ATTENTION]
