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
LARGE = PackedTiles(PackedTile(32, 64, 4, 1), PackedTile(32, 64, 4, 1), PackedTile(16, 64, 4, 1))
"""Of float32, and of heads that are larger."""


def tiles_for(features: int, dtype: torch.dtype, drops: bool) -> PackedTiles:
    """Return the tiles for heads of some features, with dropout or without."""
    if dtype.itemsize > 2 or features > 128:
        return LARGE
    if features > 64:
        return WIDE
    return NARROW if drops else NARROW_WHOLE


def forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor, factor: float, p: float, cap: float,
    tiles: PackedTiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output, (heads, rows, features) with rows outermost in memory, and the log-sum-exp in base 2.

    See `autotuner.kernels.torch.packed_attention.forward`; weights are dropped in whole 65536ths.
    """
    query, key, value = _with_features_together(query, key, value)
    heads, rows, features = query.shape
    out = torch.empty(rows, heads, features, dtype=query.dtype, device=query.device).transpose(0, 1)
    log_sum_exp = torch.empty(heads, rows, dtype=torch.float32, device=query.device)
    _forward_into(out, log_sum_exp, query, key, value, bounds, seed, (factor, p, cap), tiles)
    return out, log_sum_exp


def _forward_into(
    out: Tensor, log_sum_exp: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor,
    numbers: tuple[float, float, float], tiles: PackedTiles | None = None,
) -> None:  # fmt: skip
    """Write the output and the log-sum-exp.

    Args:
        seed: one number, or as many elements as it has bits.
        numbers: factor, p and cap.
    """
    (heads, rows, features), (factor, p, cap) = query.shape, numbers
    tile = (tiles or tiles_for(features, query.dtype, p > 0)).forward
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        program.forward[triton.cdiv(rows, tile.rows), heads](
            query, key, value, out, log_sum_exp, bounds, seed, *_strides(query, key, value, out),
            rows, factor, cap or 1.0, 1 / (1 - p), **_flags(query, key, p, cap, bounds, seed), **tile.options(rows),
        )  # fmt: skip


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor, *, bounds: Tensor,
    seers: Tensor, seed: Tensor, factor: float, p: float, cap: float, tiles: PackedTiles | None = None,
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
    _backward_into(into, given, log_sum_exp, bounds, seers, seed, (factor, p, cap), tiles)
    return into  # type: ignore[return-value]


def _backward_into(
    into: Sequence[Tensor], given: Sequence[Tensor], log_sum_exp: Tensor, bounds: Tensor, seers: Tensor, seed: Tensor,
    numbers: tuple[float, float, float], tiles: PackedTiles | None = None,
) -> None:  # fmt: skip
    """Write the gradients of query, key and value.

    Args:
        given: gradient of the output, query, key, value and output.
        seed, numbers: as in `_forward_into`.
    """
    (gradient, query, key, value, out), (factor, p, cap) = given, numbers
    heads, rows, features = query.shape
    means = torch.empty(heads, rows, dtype=torch.float32, device=query.device)
    tiles = tiles or tiles_for(features, query.dtype, p > 0)
    flags, last = _flags(query, key, p, cap, bounds, seed), (rows, factor, cap or 1.0, 1 - p)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        program.query_gradient[triton.cdiv(rows, tiles.query.rows), heads](
            query, key, value, out, gradient, into[0], log_sum_exp, means, bounds, seed,
            *_strides(query, key, value, out, gradient, into[0]), *last, **flags, **tiles.query.options(rows),
        )  # fmt: skip
        program.key_value_gradient[triton.cdiv(rows, tiles.key.columns), key.shape[0]](
            query, key, value, gradient, into[1], into[2], log_sum_exp, means, bounds, seers, seed,
            *_strides(query, key, value, gradient, into[1], into[2]), *last, **flags, **tiles.key.options(rows),
        )  # fmt: skip


def operator(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Compute the forward of an operator; a log-sum-exp that nobody reads is written to memory of its own."""
    node, (query, key, value, bounds, seed) = _node_and_operands(call, inputs)
    out, log_sum_exp = _by_heads(node, outputs, call.subgraph.outputs, node.outputs)
    numbers = settings_of(node).numbers
    if log_sum_exp is None:
        log_sum_exp = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    assert out is not None
    return lambda: _forward_into(out, log_sum_exp, query, key, value, bounds, seed, numbers)


def operator_grad(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Compute the backward of an operator; gradients that nobody wants are written to memory of their own."""
    node, (*given, log_sum_exp, bounds, seed) = _node_and_operands(call, inputs)
    found = _by_heads(node, outputs, call.subgraph.outputs, node.outputs)
    into = [like.new_empty(like.shape) if each is None else each for each, like in zip(found, given[1:4], strict=True)]
    numbers = settings_of(node).numbers
    seers = bounds[:, 2:]
    return lambda: _backward_into(into, given, log_sum_exp, bounds, seers, seed, numbers)


def _node_and_operands(call: Call, inputs: Sequence[Tensor]) -> tuple[Node, list[Tensor]]:
    """Return an operator, and what it reads: operands by heads, rows and features, bounds, and a seed or the bounds."""
    (node,) = call.subgraph.nodes
    by_number = dict(zip(call.subgraph.inputs, inputs, strict=True))
    tensors = [by_number[number] for number in node.inputs]
    reads = heads_outermost(node).reads
    turned = [each.permute(order) for each, order in zip(tensors, reads, strict=False)]
    bounds, *seed = tensors[len(reads) :]
    return node, [*turned, bounds, *(seed or [bounds])]


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


def _strides(*operands: Tensor) -> list[int]:
    """Return the strides along heads and rows."""
    return [stride for operand in operands for stride in operand.stride()[:2]]
