"""Attention over packed tokens by this project's own Triton programs: launches, and tiles by the size of a head."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from autotuner.kernels.rules.attention_triton import kept_levels
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
WIDE = PackedTiles(PackedTile(64, 128, 4, 2), PackedTile(64, 128, 8, 2), PackedTile(32, 128, 8, 2))
"""Of 16 bits, up to 128 features: those that leave all registers in place, compiled for the same device; not timed."""
LARGE = PackedTiles(PackedTile(32, 64, 4, 1), PackedTile(32, 64, 4, 1), PackedTile(16, 64, 4, 1))
"""Of float32, and of heads that are larger."""


def tiles_for(features: int, dtype: torch.dtype) -> PackedTiles:
    """Return the tiles for heads of some features."""
    if dtype.itemsize > 2 or features > 128:
        return LARGE
    return NARROW if features <= 64 else WIDE


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
    tile = (tiles or tiles_for(features, query.dtype)).forward
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        program.forward[triton.cdiv(rows, tile.rows), heads](
            query, key, value, out, log_sum_exp, bounds, seed, *_strides(query, key, value, out),
            rows, factor, cap or 1.0, 1 / (1 - p), **_flags(query, key, p, cap), **tile.options(rows),
        )  # fmt: skip
    return out, log_sum_exp


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor, *, bounds: Tensor,
    seers: Tensor, seed: Tensor, factor: float, p: float, cap: float, tiles: PackedTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, with rows outermost in memory.

    Args:
        seers: (keys, 2), the first row that sees a key and the one behind the last.
    """
    gradient, query, key, value, out = _with_features_together(gradient, query, key, value, out)
    heads, rows, features = query.shape
    into = [torch.empty(rows, each.shape[0], features, dtype=query.dtype, device=query.device).transpose(0, 1)
            for each in (query, key, value)]  # fmt: skip
    means = torch.empty(heads, rows, dtype=torch.float32, device=query.device)
    tiles = tiles or tiles_for(features, query.dtype)
    flags, last = _flags(query, key, p, cap), (rows, factor, cap or 1.0, 1 - p)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        program.query_gradient[triton.cdiv(rows, tiles.query.rows), heads](
            query, key, value, out, gradient, into[0], log_sum_exp, means, bounds, seed,
            *_strides(query, key, value, out, gradient, into[0]), *last, **flags, **tiles.query.options(rows),
        )  # fmt: skip
        program.key_value_gradient[triton.cdiv(rows, tiles.key.columns), key.shape[0]](
            query, key, value, gradient, into[1], into[2], log_sum_exp, means, bounds, seers, seed,
            *_strides(query, key, value, gradient, into[1], into[2]), *last, **flags, **tiles.key.options(rows),
        )  # fmt: skip
    return into[0], into[1], into[2]


def _flags(query: Tensor, key: Tensor, p: float, cap: float) -> dict[str, int | bool | str]:
    features = query.shape[2]
    return {
        "FEATURES": features, "WIDTH": max(16, triton.next_power_of_2(features)),
        "GROUP": query.shape[0] // key.shape[0], "CAPS": cap > 0, "DROPS": p > 0, "KEPT": kept_levels(p),
        "PRECISION": "ieee",
    }  # fmt: skip


def _with_features_together(*operands: Tensor) -> list[Tensor]:
    return [each if each.stride(-1) == 1 else each.contiguous() for each in operands]


def _strides(*operands: Tensor) -> list[int]:
    """Return the strides along heads and rows."""
    return [stride for operand in operands for stride in operand.stride()[:2]]
