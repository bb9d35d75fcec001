"""Tiles of attention over packed tokens: their sizes by default, and as parameters of a candidate."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log2

from autotuner.ir.records import Scalar
from autotuner.kernels.rules.attention_triton import SHARED_BYTES

DEFAULT = "default"
"""Text of the tile that follows from the operands, which candidates without parameters have as well."""
TILED: dict[str, dict[str, str]] = {
    "packed_attention": {"tile": "forward"},
    "packed_attention_grad": {"query_tile": "query", "key_tile": "key"},
    "packed_attention_grad_bias": {"tile": "bias"},
}
"""Parameters by kind of operator, with the program that each is of."""
ROWS, COLUMNS, BIAS_ROWS = (16, 32, 64, 128), (64, 128), (32, 64)
WARP_ROWS = 8
"""Rows of scores that a warp computes, or a multiple; in the program of keys and values they are columns."""
SCORE_BYTES = 4


@dataclass(frozen=True)
class PackedTile:
    """Rows and keys of a tile, and how a program of it is compiled.

    >>> PackedTile.parse("64x128x4x2")
    PackedTile(rows=64, columns=128, warps=4, stages=2)
    """

    rows: int
    columns: int
    warps: int
    stages: int

    @classmethod
    def parse(cls, text: str) -> "PackedTile | None":
        """Return the tile of a parameter's text, or None if it is none."""
        return cls(*map(int, text.split("x"))) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", text) else None


@dataclass(frozen=True)
class PackedTiles:
    """Tiles of forward, of queries and of keys in backward, and of the gradient of a relative bias."""

    forward: PackedTile
    query: PackedTile
    key: PackedTile
    bias: PackedTile = PackedTile(64, 128, 8, 1)

    def chosen(self, kind: str, params: Mapping[str, Scalar]) -> "PackedTiles":
        """Return the tiles with those that parameters of an operator name."""
        found = {program: PackedTile.parse(str(params.get(name, DEFAULT))) for name, program in TILED[kind].items()}
        return replace(self, **{program: tile for program, tile in found.items() if tile is not None})


# Plans and measurements without parameters are of these: where one changes, the kernels get a new version.
NARROW = PackedTiles(PackedTile(64, 128, 4, 2), PackedTile(64, 128, 4, 2), PackedTile(32, 128, 4, 2))
"""Of 16 bits, heads of up to 64 features: the fastest of nine each, on an H200 (16 heads, 16,384 tokens, dropout)."""
NARROW_WHOLE = PackedTiles(PackedTile(64, 64, 4, 3), PackedTile(64, 64, 4, 3), PackedTile(32, 64, 4, 2))
"""The same without dropout: the fastest of six each."""
WIDE = PackedTiles(PackedTile(64, 128, 4, 2), PackedTile(64, 128, 8, 2), PackedTile(32, 128, 8, 2))
"""Of 16 bits, up to 128 features: those that leave all registers in place. Of five forward and four backward, the
fastest on an H200 (LLaMA 1B, 16,384 tokens)."""
NARROW_BIASED = PackedTiles(PackedTile(64, 64, 4, 2), PackedTile(64, 64, 4, 2), PackedTile(32, 64, 4, 2))
"""Of 16 bits, up to 64 features, with a relative bias: as `WIDE`, and in 66 KB of shared memory. The fastest of five
forward on an H200; in backward, keys by 64x128x8x2 take a quarter less, which a tuning finds."""
WIDE_BIASED = PackedTiles(PackedTile(64, 64, 4, 2), PackedTile(64, 64, 8, 2), PackedTile(32, 64, 8, 2))
"""The same up to 128 features, in 115 KB."""
LARGE = PackedTiles(
    PackedTile(32, 64, 4, 1), PackedTile(32, 64, 4, 1), PackedTile(16, 64, 4, 1), PackedTile(32, 64, 8, 1)
)
"""Of float32, and of heads that are larger."""


def default_tiles(features: int, element_bytes: int, *, drops: bool, biased: bool) -> PackedTiles:
    """Return the tiles for heads of some features, with dropout or without, and perhaps with a relative bias."""
    if element_bytes > 2 or features > 128:
        return LARGE
    if biased:
        return WIDE_BIASED if features > 64 else NARROW_BIASED
    if features > 64:
        return WIDE
    return NARROW if drops else NARROW_WHOLE


def unfit_tiles(
    kind: str, params: Mapping[str, Scalar], features: int, element_bytes: int, *, drops: bool, biased: bool
) -> str | None:
    """Say why no program runs with the tiles that parameters name, or None if all do."""
    wanted = TILED[kind]
    if not params:
        return None
    if set(params) != set(wanted):
        return f"it takes the parameters {', '.join(wanted)}, or none; given: {', '.join(params)}"
    named = {name: str(text) for name, text in params.items() if text != DEFAULT}
    if named and element_bytes > 2:
        return f"operands of {element_bytes} bytes have default tiles; given: {' and '.join(named.values())}"
    default = default_tiles(features, element_bytes, drops=drops, biased=biased)
    for name, text in named.items():
        tile = PackedTile.parse(text)
        if tile is None:
            return f"{name} is {DEFAULT}, or rows, keys, warps and stages such as 64x128x4x2; given: {text}"
        if tile == getattr(default, wanted[name]):
            return f"{name} is {text} by default"
        reason = _unfit(tile, wanted[name], features, element_bytes, biased=biased)
        if reason is not None:
            return f"{name} {text}: {reason}"
    return None


def _unfit(tile: PackedTile, program: str, features: int, element_bytes: int, *, biased: bool) -> str | None:
    """Say why a program cannot run with a tile, or None if it can."""
    rows = BIAS_ROWS if program == "bias" else ROWS
    if tile.rows not in rows:
        return f"rows are {', '.join(map(str, rows))}"
    if tile.columns not in COLUMNS or (program == "bias" and tile.columns != 2 * tile.rows):
        return "keys are twice the rows" if program == "bias" else f"keys are {', '.join(map(str, COLUMNS))}"
    if log2(tile.warps) % 1:
        return "warps are a power of 2"
    side, own = ("keys", tile.columns) if program == "key" else ("rows", tile.rows)
    if own < WARP_ROWS * tile.warps:
        return f"a warp computes {WARP_ROWS} of the {side} or more; {tile.warps} share {own}"
    taken = shared_bytes(tile, program, features, element_bytes, biased=biased)
    if taken > SHARED_BYTES:
        return f"it takes {taken:,} bytes of shared memory; a program has {SHARED_BYTES:,} at most"
    return None


def shared_bytes(tile: PackedTile, program: str, features: int, element_bytes: int, *, biased: bool) -> int:
    """Return what tiles of operands take of shared memory: those that stay, and those that `stages` steps read.

    A bias is read a step ahead, and its gradient is shifted there. Numbers of rows take up to 3 KB beside.
    """
    own, read = (tile.columns, tile.rows) if program == "key" else (tile.rows, tile.columns)
    row_bytes = element_bytes * max(16, 1 << (features - 1).bit_length())
    stay = 1 if program == "forward" else 2
    scores = SCORE_BYTES * tile.rows * tile.columns
    beside = scores if program == "bias" else scores * (tile.stages - 1) * biased
    return row_bytes * (stay * own + 2 * tile.stages * read) + beside
