"""Attention over packed tokens by this project's own Triton programs: launches, and tiles by the size of a head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from autotuner.ir.packed_attention import BITS_OF_SEED
from autotuner.ir.records import Call, Node
from autotuner.kernels.rules.attention_triton import LEVELS, kept_levels
from autotuner.kernels.rules.packed_attention import heads_outermost, settings_of
from autotuner.kernels.triton import packed_attention_program as program
from autotuner.kernels.triton import packed_bias_program as bias_program


@dataclass(frozen=True)
class PackedTile:
    """Rows and keys of a tile, and how a program of it is compiled."""

    rows: int
    columns: int
    warps: int
    stages: int

    def options(self, rows: int) -> dict[str, int | bool]:
        return {
            "ROWS": self.rows, "COLUMNS": self.columns, "EVEN": rows % self.rows == rows % self.columns == 0,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


@dataclass(frozen=True)
class PackedTiles:
    """PackedTiles of forward, and of queries and of keys in backward."""

    forward: PackedTile
    query: PackedTile
    key: PackedTile


NARROW = PackedTiles(PackedTile(64, 128, 4, 2), PackedTile(64, 128, 4, 2), PackedTile(32, 128, 4, 2))
"""Of 16 bits, heads of up to 64 features: the fastest of nine each, on an H200 (16 heads, 16,384 tokens, dropout)."""
NARROW_WHOLE = PackedTiles(PackedTile(64, 64, 4, 3), PackedTile(64, 64, 4, 3), PackedTile(32, 64, 4, 2))
"""The same without dropout: the fastest of six each."""
WIDE = PackedTiles(PackedTile(64, 128, 4, 2), PackedTile(64, 128, 8, 2), PackedTile(32, 128, 8, 2))
"""Of 16 bits, up to 128 features: those that leave all registers in place, compiled for the same device; not timed."""
NARROW_BIASED = PackedTiles(PackedTile(64, 64, 4, 2), PackedTile(64, 64, 4, 2), PackedTile(32, 64, 4, 2))
"""Of 16 bits, up to 64 features, with a relative bias: as `WIDE`, and in 66 KB of shared memory; not timed."""
WIDE_BIASED = PackedTiles(PackedTile(64, 64, 4, 2), PackedTile(64, 64, 8, 2), PackedTile(32, 64, 8, 2))
"""The same up to 128 features, in 115 KB."""
LARGE = PackedTiles(PackedTile(32, 64, 4, 1), PackedTile(32, 64, 4, 1), PackedTile(16, 64, 4, 1))
"""Of float32, and of heads that are larger."""
PROGRAMS = 1024
"""Programs of a relative bias's gradient, which fill a device: where there are few distances, they share out rows."""


def tiles_for(features: int, dtype: torch.dtype, drops: bool, biased: bool) -> PackedTiles:
    """Return the tiles for heads of some features, with dropout or without, and perhaps with a relative bias."""
    if dtype.itemsize > 2 or features > 128:
        return LARGE
    if biased:
        return WIDE_BIASED if features > 64 else NARROW_BIASED
    if features > 64:
        return WIDE
    return NARROW if drops else NARROW_WHOLE


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
    _forward_into(out, log_sum_exp, (query, key, value), bounds, seed, bias, (factor, p, cap), tiles)
    return out, log_sum_exp


def _forward_into(
    out: Tensor, log_sum_exp: Tensor, given: Sequence[Tensor], bounds: Tensor, seed: Tensor, bias: Tensor | None,
    numbers: tuple[float, float, float], tiles: PackedTiles | None = None,
) -> None:  # fmt: skip
    """Write the output and the log-sum-exp.

    Args:
        given: query, key and value.
        seed: one number, or as many elements as it has bits.
        bias: (heads, distances), or None.
        numbers: factor, p and cap.
    """
    query, key, value = given
    (heads, rows, features), (factor, p, cap) = query.shape, numbers
    tile = (tiles or tiles_for(features, query.dtype, p > 0, bias is not None)).forward
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        program.forward[triton.cdiv(rows, tile.rows), heads](
            query, key, value, out, log_sum_exp, bounds, seed, query if bias is None else bias,
            *_strides(query, key, value, out), rows, factor, cap or 1.0, 1 / (1 - p), *_reach(bias),
            **_flags(query, key, p, cap, bounds, seed), BIASED=bias is not None, **tile.options(rows),
        )  # fmt: skip


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
    _backward_into(into, given, log_sum_exp, bounds, seers, seed, bias, (factor, p, cap), tiles)
    return into  # type: ignore[return-value]


def bias_gradient(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor, *, bounds: Tensor,
    seed: Tensor, factor: float, p: float, cap: float, bias: Tensor,
) -> Tensor:  # fmt: skip
    """Return the gradient of a relative bias, (heads, distances)."""
    into = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    given = _with_features_together(gradient, query, key, value, out)
    _bias_gradient_into(into, given, log_sum_exp, bounds, seed, bias, (factor, p, cap))
    return into


def _backward_into(
    into: Sequence[Tensor], given: Sequence[Tensor], log_sum_exp: Tensor, bounds: Tensor, seers: Tensor, seed: Tensor,
    bias: Tensor | None, numbers: tuple[float, float, float], tiles: PackedTiles | None = None,
) -> None:  # fmt: skip
    """Write the gradients of query, key and value.

    Args:
        given: gradient of the output, query, key, value and output.
        seed, bias, numbers: as in `_forward_into`.
    """
    (gradient, query, key, value, out), (factor, p, cap) = given, numbers
    heads, rows, features = query.shape
    means = torch.empty(heads, rows, dtype=torch.float32, device=query.device)
    added, reach = query if bias is None else bias, _reach(bias)
    tiles = tiles or tiles_for(features, query.dtype, p > 0, bias is not None)
    flags, last = _flags(query, key, p, cap, bounds, seed), (rows, factor, cap or 1.0, 1 - p, *reach)
    flags["BIASED"] = bias is not None
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        program.query_gradient[triton.cdiv(rows, tiles.query.rows), heads](
            query, key, value, out, gradient, into[0], log_sum_exp, means, bounds, seed, added,
            *_strides(query, key, value, out, gradient, into[0]), *last, **flags, **tiles.query.options(rows),
        )  # fmt: skip
        program.key_value_gradient[triton.cdiv(rows, tiles.key.columns), key.shape[0]](
            query, key, value, gradient, into[1], into[2], log_sum_exp, means, bounds, seers, seed, added,
            *_strides(query, key, value, gradient, into[1], into[2]), *last, **flags, **tiles.key.options(rows),
        )  # fmt: skip


def _bias_gradient_into(
    into: Tensor, given: Sequence[Tensor], log_sum_exp: Tensor, bounds: Tensor, seed: Tensor, bias: Tensor,
    numbers: tuple[float, float, float],
) -> None:  # fmt: skip
    """Write the gradient of a relative bias.

    Args:
        given: as in `_backward_into`.
        seed, numbers: as in `_forward_into`.
    """
    (gradient, query, key, value, out), (factor, p, cap) = given, numbers
    heads, rows, features = query.shape
    tile = 32 if query.dtype.itemsize > 2 or features > 128 else 64
    reach = bias.shape[1] // 2
    blocks = triton.cdiv(reach, tile) + reach // tile + 1
    parts = min(triton.cdiv(rows, tile), triton.cdiv(PROGRAMS, blocks * heads))
    sums = torch.empty(parts, *bias.shape, dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        bias_program.bias_gradient[blocks, parts, heads](
            query, key, value, out, gradient, sums, log_sum_exp, bounds, seed, bias,
            *_strides(query, key, value, out, gradient), rows, factor, cap or 1.0, 1 - p, *_reach(bias),
            **_flags(query, key, p, cap, bounds, seed), ROWS=tile, COLUMNS=2 * tile, num_warps=8, num_stages=1,
        )  # fmt: skip
    torch.sum(sums, 0, out=into)


def operator(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Compute the forward of an operator; a log-sum-exp that nobody reads is written to memory of its own."""
    node, given, bounds, seed, bias = _node_and_operands(call, inputs)
    out, log_sum_exp = _by_heads(node, outputs, call.subgraph.outputs, node.outputs)
    numbers = settings_of(node).numbers
    if log_sum_exp is None:
        log_sum_exp = torch.empty(given[0].shape[:2], dtype=torch.float32, device=given[0].device)
    assert out is not None
    return lambda: _forward_into(out, log_sum_exp, given, bounds, seed, bias, numbers)


def operator_grad(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Compute the backward of an operator; gradients that nobody wants are written to memory of their own."""
    node, (*given, log_sum_exp), bounds, seed, bias = _node_and_operands(call, inputs)
    found = _by_heads(node, outputs, call.subgraph.outputs, node.outputs)
    into = [like.new_empty(like.shape) if each is None else each for each, like in zip(found, given[1:4], strict=True)]
    numbers = settings_of(node).numbers
    seers = bounds[:, 2:]
    return lambda: _backward_into(into, given, log_sum_exp, bounds, seers, seed, bias, numbers)


def operator_grad_bias(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Compute the gradient of an operator's relative bias."""
    node, (*given, log_sum_exp), bounds, seed, bias = _node_and_operands(call, inputs)
    assert bias is not None
    added, into, numbers = bias, outputs[0].permute(heads_outermost(node).bias), settings_of(node).numbers
    return lambda: _bias_gradient_into(into, given, log_sum_exp, bounds, seed, added, numbers)


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
