"""Launches of attention over packed tokens by this project's own Triton programs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from autotuner.ir.packed_attention import BITS_OF_SEED
from autotuner.ir.records import Call, Node
from autotuner.kernels.rules.attention_triton import LEVELS, kept_levels
from autotuner.kernels.rules.packed_attention import heads_outermost, settings_of
from autotuner.kernels.rules.packed_tiles import PackedTile, PackedTiles, default_tiles
from autotuner.kernels.triton import packed_attention_program as program
from autotuner.kernels.triton import packed_bias_program as bias_program
from autotuner.kernels.triton.attention import TritonLaunch

Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""A program with its grid, its arguments and its constants."""
PROGRAMS = 1024
"""Programs of a relative bias's gradient, which fill a device: where there are few distances, they share out rows."""


def forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor, factor: float, p: float, cap: float,
    bias: Tensor | None = None, *, tiles: PackedTiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output, (heads, rows, features) with rows outermost in memory, and the log-sum-exp in base 2.

    See `autotuner.kernels.torch.packed_attention.forward`; weights are dropped in whole 65536ths.
    """
    query, key, value = _with_features_together(query, key, value)
    heads, rows, features = query.shape
    out = torch.empty(rows, heads, features, dtype=query.dtype, device=query.device).transpose(0, 1)
    log_sum_exp = torch.empty(heads, rows, dtype=torch.float32, device=query.device)
    tile = (tiles or _default_tiles(query, p, bias)).forward
    _launch([_forward(out, log_sum_exp, (query, key, value), bounds, seed, bias, (factor, p, cap), tile)])
    return out, log_sum_exp


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor, *, bounds: Tensor,
    seers: Tensor, seed: Tensor, factor: float, p: float, cap: float, bias: Tensor | None = None,
    tiles: PackedTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, with rows outermost in memory.

    Args:
        seers: (keys, 2), the first row that sees a key and the one behind the last.
    """
    given = _with_features_together(gradient, query, key, value, out)
    rows, features = query.shape[1:]
    into = tuple(
        torch.empty(rows, each.shape[0], features, dtype=query.dtype, device=query.device).transpose(0, 1)
        for each in (query, key, value)
    )
    tiles = tiles or _default_tiles(query, p, bias)
    _launch(_backward(into, given, log_sum_exp, bounds, seers, seed, bias, (factor, p, cap), tiles))
    return into  # type: ignore[return-value]


def bias_gradient(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor, *, bounds: Tensor,
    seed: Tensor, factor: float, p: float, cap: float, bias: Tensor, tiles: PackedTiles | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of a relative bias, (heads, distances)."""
    into = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    given = _with_features_together(gradient, query, key, value, out)
    tile = (tiles or _default_tiles(query, p, bias)).bias
    sums, launch = _bias_gradient(given, log_sum_exp, bounds, seed, bias, (factor, p, cap), tile)
    _launch([launch])
    torch.sum(sums, 0, out=into)
    return into


def _forward(
    out: Tensor, log_sum_exp: Tensor, given: Sequence[Tensor], bounds: Tensor, seed: Tensor, bias: Tensor | None,
    numbers: tuple[float, float, float], tile: PackedTile,
) -> Launch:  # fmt: skip
    """Return the launch that writes the output and the log-sum-exp.

    Args:
        given: query, key and value.
        seed: one number, or as many elements as it has bits.
        bias: (heads, distances), or None.
        numbers: factor, p and cap.
    """
    query, key, value = given
    (heads, rows, _), (factor, p, cap) = query.shape, numbers
    arguments = (
        query, key, value, out, log_sum_exp, bounds, seed, query if bias is None else bias,
        *_strides(query, key, value, out), rows, factor, cap or 1.0, 1 / (1 - p), *_reach(bias),
    )  # fmt: skip
    constants = _flags(query, key, p, cap, bounds, seed) | {"BIASED": bias is not None} | _options(tile, rows)
    return program.forward, (triton.cdiv(rows, tile.rows), heads), arguments, constants


def _backward(
    into: Sequence[Tensor], given: Sequence[Tensor], log_sum_exp: Tensor, bounds: Tensor, seers: Tensor, seed: Tensor,
    bias: Tensor | None, numbers: tuple[float, float, float], tiles: PackedTiles,
) -> list[Launch]:  # fmt: skip
    """Return the launches that write the gradients of query, and of key and value, one behind the other.

    Args:
        given: gradient of the output, query, key, value and output.
        seed, bias, numbers: as in `_forward`.
    """
    (gradient, query, key, value, out), (factor, p, cap) = given, numbers
    heads, rows, _ = query.shape
    means = torch.empty(heads, rows, dtype=torch.float32, device=query.device)
    added, last = query if bias is None else bias, (rows, factor, cap or 1.0, 1 - p, *_reach(bias))
    flags = _flags(query, key, p, cap, bounds, seed) | {"BIASED": bias is not None}
    of_query = (
        query, key, value, out, gradient, into[0], log_sum_exp, means, bounds, seed, added,
        *_strides(query, key, value, out, gradient, into[0]), *last,
    )  # fmt: skip
    of_key = (
        query, key, value, gradient, into[1], into[2], log_sum_exp, means, bounds, seers, seed, added,
        *_strides(query, key, value, gradient, into[1], into[2]), *last,
    )  # fmt: skip
    row_tiles, key_tiles = triton.cdiv(rows, tiles.query.rows), triton.cdiv(rows, tiles.key.columns)
    return [
        (program.query_gradient, (row_tiles, heads), of_query, flags | _options(tiles.query, rows)),
        (program.key_value_gradient, (key_tiles, key.shape[0]), of_key, flags | _options(tiles.key, rows)),
    ]


def _bias_gradient(
    given: Sequence[Tensor], log_sum_exp: Tensor, bounds: Tensor, seed: Tensor, bias: Tensor,
    numbers: tuple[float, float, float], tile: PackedTile,
) -> tuple[Tensor, Launch]:  # fmt: skip
    """Return parts of the gradient of a relative bias, (parts, heads, distances), and the launch that writes them.

    Args:
        given: as in `_backward`.
        seed, numbers: as in `_forward`.
    """
    (gradient, query, key, value, out), (factor, p, cap) = given, numbers
    heads, rows, _ = query.shape
    reach = bias.shape[1] // 2
    blocks = triton.cdiv(reach, tile.rows) + reach // tile.rows + 1
    parts = min(triton.cdiv(rows, tile.rows), triton.cdiv(PROGRAMS, blocks * heads))
    sums = torch.empty(parts, *bias.shape, dtype=torch.float32, device=query.device)
    arguments = (
        query, key, value, out, gradient, sums, log_sum_exp, bounds, seed, bias,
        *_strides(query, key, value, out, gradient), rows, factor, cap or 1.0, 1 - p, *_reach(bias),
    )  # fmt: skip
    constants = _flags(query, key, p, cap, bounds, seed) | _options(tile, rows)
    del constants["EVEN"]
    return sums, (bias_program.bias_gradient, (blocks, parts, heads), arguments, constants)


def _launch(launches: Sequence[Launch]) -> None:
    """Launch programs on the device of their operands, one behind the other."""
    with torch.cuda.device_of(launches[0][2][0]):  # type: ignore[no-untyped-call]
        for each, grid, arguments, constants in launches:
            each[grid](*arguments, **constants)


def operator(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Compute the forward of an operator; a log-sum-exp that nobody reads is written to memory of its own."""
    node, given, bounds, seed, bias = _node_and_operands(call, inputs)
    out, log_sum_exp = _by_heads(node, outputs, call.subgraph.outputs, node.outputs)
    if log_sum_exp is None:
        log_sum_exp = torch.empty(given[0].shape[:2], dtype=torch.float32, device=given[0].device)
    assert out is not None
    numbers, tile = settings_of(node).numbers, _chosen_tiles(call, given[0], bias).forward
    launch = _forward(out, log_sum_exp, given, bounds, seed, bias, numbers, tile)
    return TritonLaunch(*launch)


def operator_grad(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Compute the backward of an operator; gradients that nobody wants are written to memory of their own."""
    node, (*given, log_sum_exp), bounds, seed, bias = _node_and_operands(call, inputs)
    found = _by_heads(node, outputs, call.subgraph.outputs, node.outputs)
    into = [like.new_empty(like.shape) if each is None else each for each, like in zip(found, given[1:4], strict=True)]
    numbers, tiles = settings_of(node).numbers, _chosen_tiles(call, given[1], bias)
    seers = bounds[:, 2:]

    def launches() -> list[Launch]:
        return _backward(into, given, log_sum_exp, bounds, seers, seed, bias, numbers, tiles)

    _compile(launches())
    return lambda: _launch(launches())


def operator_grad_bias(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Compute the gradient of an operator's relative bias."""
    node, (*given, log_sum_exp), bounds, seed, bias = _node_and_operands(call, inputs)
    assert bias is not None
    added, into, numbers = bias, outputs[0].permute(heads_outermost(node).bias), settings_of(node).numbers
    tile = _chosen_tiles(call, given[1], bias).bias

    def parts_and_launch() -> tuple[Tensor, Launch]:
        return _bias_gradient(given, log_sum_exp, bounds, seed, added, numbers, tile)

    def run() -> None:
        parts, launch = parts_and_launch()
        _launch([launch])
        torch.sum(parts, 0, out=into)

    _compile([parts_and_launch()[1]])
    return run


def _compile(launches: Sequence[Launch]) -> None:
    """Compile programs; what they launch is made anew each time, since memory between them is not held."""
    for launch in launches:
        TritonLaunch(*launch)


def _default_tiles(query: Tensor, p: float, bias: Tensor | None) -> PackedTiles:
    return default_tiles(query.shape[2], query.dtype.itemsize, drops=p > 0, biased=bias is not None)


def _chosen_tiles(call: Call, query: Tensor, bias: Tensor | None) -> PackedTiles:
    """Return the tiles that a candidate's parameters name, and default ones beside."""
    (node,) = call.subgraph.nodes
    default = _default_tiles(query, settings_of(node).dropped, bias)
    return default.chosen(node.kind, dict(call.candidate.params))


def _options(tile: PackedTile, rows: int) -> dict[str, int | bool]:
    return {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "EVEN": rows % tile.rows == rows % tile.columns == 0,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def _node_and_operands(
    call: Call, inputs: Sequence[Tensor]
) -> tuple[Node, list[Tensor], Tensor, Tensor, Tensor | None]:
    """Return an operator, and what it reads.

    Returns:
        The operator; operands by heads, rows and features; bounds; a seed, or the bounds where there is none; a
        relative bias by heads and distances, or None.
    """
    (node,) = call.subgraph.nodes
    by_number = dict(zip(call.subgraph.inputs, inputs, strict=True))
    tensors = [by_number[number] for number in node.inputs]
    orders, settings = heads_outermost(node), settings_of(node)
    turned = [each.permute(order) for each, order in zip(tensors, orders.reads, strict=False)]
    bounds = tensors[settings.bounds]
    seed = bounds if settings.seed is None else tensors[settings.seed]
    bias = None if settings.bias is None else tensors[settings.bias].permute(orders.bias)
    return node, turned, bounds, seed, bias


def _by_heads(
    node: Node, outputs: Sequence[Tensor | None], numbers: Sequence[int], wanted: Sequence[int]
) -> list[Tensor | None]:
    """Return what an operator makes by heads, rows and features; None for what is not to be written."""
    by_number = dict(zip(numbers, outputs, strict=True))
    found = [by_number.get(number) for number in wanted]
    back = heads_outermost(node).back
    return [
        None if each is None else each.permute([order.index(place) for place in range(len(order))])
        for each, order in zip(found, back, strict=True)
    ]


def _flags(
    query: Tensor, key: Tensor, p: float, cap: float, bounds: Tensor, seed: Tensor
) -> dict[str, int | bool | str]:
    features = query.shape[2]
    return {
        "FEATURES": features, "WIDTH": max(16, triton.next_power_of_2(features)),
        "GROUP": query.shape[0] // key.shape[0], "CAPS": cap > 0, "DROPS": kept_levels(p) < LEVELS,
        "KEPT": kept_levels(p), "STEP": bounds.stride(0), "BITS": 0 if seed.dtype == torch.int64 else BITS_OF_SEED,
        "PRECISION": "ieee",
    }  # fmt: skip


def _with_features_together(*operands: Tensor) -> list[Tensor]:
    return [each if each.stride(-1) == 1 else each.contiguous() for each in operands]


def _reach(bias: Tensor | None) -> tuple[int, int, int]:
    """Return the reach of a relative bias, and its strides along heads and distances."""
    return (0, 0, 0) if bias is None else (bias.shape[1] // 2, bias.stride(0), bias.stride(1))


def _strides(*operands: Tensor) -> list[int]:
    """Return the strides along heads and rows."""
    return [stride for operand in operands for stride in operand.stride()[:2]]
