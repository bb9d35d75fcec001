"""Programs whose results are written where they belong: concatenations part by part, grouped products by Triton."""

from dataclasses import dataclass
from functools import partial

from autotuner.ir.program import Program, parse_program
from autotuner.ir.records import Candidate, Subgraph
from autotuner.kernels.registry import KERNELS, Kernel
from autotuner.kernels.rules.programs import not_as_declared

INNER = 64
"""Elements that a tile of a grouped product contracts at once; groups' matrices have a multiple of them."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a grouped product that a Triton program makes at once."""

    rows: int
    columns: int
    warps: int
    stages: int


TILES = {
    "64x256": Tile(64, 256, 4, 4),
    "128x128": Tile(128, 128, 4, 4),
    "128x256": Tile(128, 256, 8, 4),
    "256x128": Tile(256, 128, 8, 3),
}
"""Tiles of grouped products by name, as the parameters `tile` and `matrices_tile` of a candidate have it."""
NO_TILE = "none"
"""Name of the tile where there is no such product, or ATen makes it, and it is copied."""
PARTED = ("cat", "stack", "split", "split_with_sizes", "chunk", "unbind", "slice", "narrow", "select")
"""Calls that concatenate, or whose gradient does."""


def tiles_of(candidate: Candidate) -> tuple[str, str]:
    """Return the tiles of products with a matrix of each group, and of those that make such matrices."""
    params = dict(candidate.params)
    return str(params["tile"]), str(params["matrices_tile"])


def not_in_place(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why no result of a program can be written in place, or None."""
    (node,) = subgraph.nodes
    program, tiles = parse_program(str(dict(node.attributes)["program"])), tiles_of(candidate)
    for tile in tiles:
        if tile != NO_TILE and tile not in TILES:
            return f"a tile is one of {', '.join((NO_TILE, *TILES))}; given: {tile!r}"
    if not any(call.name == "_grouped_mm.default" for call in program.calls):
        if tiles != (NO_TILE, NO_TILE):
            return f"a program without grouped products has no tiles; given: {' and '.join(tiles)}"
        if not any(call.name.partition(".")[0] in PARTED for call in program.calls):
            return "nothing is concatenated, and there is no grouped product"
        return not_as_declared(subgraph, candidate)
    if tiles[0] == NO_TILE or (node.kind == "program" and tiles[1] != NO_TILE):
        return f"a grouped product has a tile, and its gradient a second one; given: {' and '.join(tiles)}"
    return _no_tiles(program) or not_as_declared(subgraph, candidate)


def _no_tiles(program: Program) -> str | None:
    """Say why Triton's programs do not make a grouped product, or None."""
    if program.output[0] != "bfloat16":
        return f"grouped products are tried in bfloat16, and not in {program.output[0]}"
    odd = [x for each in program.inputs if len(each.shape) == 3 for x in each.shape[1:] if x % INNER]
    return f"matrices of groups have multiples of {INNER} elements along both axes, and not {odd[0]}" if odd else None


_in_place = partial(
    Kernel, runs="autotuner.kernels.inductor.in_place:in_place", refuses=not_in_place, compiles=True
)  # fmt: skip
KERNELS.add(
    _in_place("inductor_in_place_program", ("program",)),
    _in_place("inductor_in_place_program_grad", ("program_grad",)),
)
