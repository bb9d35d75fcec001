"""Inductor on a program whose results are written where they belong: concatenations part by part, grouped products by
Triton programs. `inductor` makes such results first, and copies them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from autotuner.errors import KernelError
from autotuner.ir.records import Call
from autotuner.kernels.inductor.fused import compiled, traced, written_outputs
from autotuner.kernels.inductor.grouped import grouped_product_into
from autotuner.kernels.rules.in_place import NO_TILE, tiles_of

aten = torch.ops.aten
ALIGNMENT_BYTES = 16
"""Inductor copies operands that begin elsewhere, and would write the copies."""


@dataclass(frozen=True)
class Written:
    """A view of an output that a call writes: an operand of its own.

    Args:
        output: its number.
        views: calls that make the view of the output: ("narrow", ...), ("view", ...), ("permute", ...).
    """

    output: int
    views: tuple[tuple[Any, ...], ...]

    def of(self, outputs: Sequence[Tensor]) -> Tensor:
        view = outputs[self.output]
        for name, *arguments in self.views:
            view = getattr(view, name)(*arguments)
        return view


_COMPILED: dict[str, tuple[Callable[[list[Tensor]], Any], tuple[Written, ...]]] = {}


def in_place(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Compile a program, or fetch it from the compiler's cache on disk.

    Raises:
        KernelError: nothing of it could be written in place.
    """
    key = f"{call.key} {inputs[0].device}"
    if key not in _COMPILED:
        _COMPILED[key] = _compile(call, inputs, outputs)
    run, written = _COMPILED[key]
    operands = (*inputs, *outputs, *(each.of(outputs) for each in written))
    return lambda: run(list(operands))


def _compile(
    call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> tuple[Callable[[list[Tensor]], Any], tuple[Written, ...]]:
    module, fakes, mode = traced(written_outputs(call, len(inputs)), (*inputs, *outputs))
    tiles = tiles_of(call.candidate)
    found = _rewritten(module, len(inputs), outputs, tiles)
    if not found:
        raise KernelError("its results are neither concatenations nor grouped products")
    with mode:
        fakes += [each.of(fakes[len(inputs) : len(inputs) + len(outputs)]) for each in found]
    return compiled(module, fakes, mode), tuple(found)


def _rewritten(module: fx.GraphModule, count: int, outputs: Sequence[Tensor], tiles: tuple[str, str]) -> list[Written]:
    """Let calls write outputs, and return the operands that this adds behind the others."""
    graph, found = module.graph, list[Written]()
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    targets = {node: number for number, node in enumerate(placeholders[count:])}

    def operand(written: Written) -> fx.Node:
        found.append(written)
        with graph.inserting_after(placeholders[-1]):
            node = graph.placeholder(f"written_{len(found)}")
        node.meta["val"] = written.of([each.meta["val"] for each in placeholders[count : count + len(outputs)]])
        placeholders.append(node)
        return node

    for copy in list(graph.find_nodes(op="call_function", target=aten.copy_.default)):
        arguments: Any = copy.args
        number = targets.get(arguments[0])
        if number is None:
            continue
        made, views = _before_views(arguments[1])
        if made.target is aten.cat.default and not views:
            parts = _parts(made, outputs[number])
            with graph.inserting_before(copy):
                for part, narrow in parts:
                    graph.call_function(aten.copy_.default, (operand(Written(number, (narrow,))), part))
            if parts:
                graph.erase_node(copy)
        elif made.target is torch.ops.autotuner.grouped_product.default and len(made.users) == 1:
            tile, written = tiles[_rank(made.args[1]) == 2], Written(number, views)
            if tile != NO_TILE and _can_view(written, outputs):
                with graph.inserting_before(copy):
                    out = operand(written)
                    graph.call_function(grouped_product_into, (*made.args, out, tile))
                graph.erase_node(copy)
    graph.eliminate_dead_code(_has_effect)
    module.recompile()
    return found


def _has_effect(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.target in (aten.copy_.default, grouped_product_into)


def _rank(node: Any) -> int:
    rank: int = node.meta["val"].ndim
    return rank


def _before_views(value: Any) -> tuple[fx.Node, tuple[tuple[Any, ...], ...]]:
    """Return what views are of, and the calls that make of a tensor like the last view one like the first value."""
    views: list[tuple[Any, ...]] = []
    while True:
        if value.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
            (source, *_) = value.args
            if tuple(source.meta["val"].shape) != tuple(value.meta["val"].shape):
                views.append(("view", tuple(source.meta["val"].shape)))
        elif value.target is aten.permute.default:
            source, order = value.args[:2]
            rank = len(order)
            views.append(("permute", tuple(sorted(range(rank), key=[place % rank for place in order].__getitem__))))
        else:
            return value, tuple(views)
        value = source


def _parts(made: fx.Node, output: Tensor) -> list[tuple[fx.Node, tuple[Any, ...]]]:
    """Return the parts of a concatenation, with the slice of the output that each one is, or none where a slice does
    not begin where the compiler wants operands to begin."""
    arguments: Any = made.args
    parts, dim = list(arguments[0]), (arguments[1] if len(arguments) > 1 else 0) % output.ndim
    lengths = [each.meta["val"].shape[dim] for each in parts]
    starts = [0, *accumulate(lengths)]
    step = output.stride(dim) * output.element_size()
    if any(start * step % ALIGNMENT_BYTES for start in starts):
        return []
    return [(part, ("narrow", dim, start, length)) for part, start, length in zip(parts, starts, lengths, strict=False)]


def _can_view(written: Written, outputs: Sequence[Tensor]) -> bool:
    try:
        written.of(outputs)
    except RuntimeError:
        return False
    return True
