"""Prints, as JSON, relative errors of grouped products, and of sums of rows, by Triton programs in its interpreter.

`TRITON_INTERPRET=1` has to be set before Triton is imported. Rows behind the last group have to stay as they are.

    python -m tests.kernels.interpreted_groups
"""

import json

import torch
from torch import Tensor

from autotuner.kernels.rules.in_place import TILES, Tile
from autotuner.kernels.triton.added_rows import summed
from autotuner.kernels.triton.grouped import multiply

ROWS, INNER, COLUMNS = 200, 128, 72
ENDS = torch.tensor([0, 10, 83, 83, 195], dtype=torch.int32)
"""Groups without rows, and of rows that are no multiple of a tile; five rows are behind the last one."""
SMALL = {"16x32": Tile(16, 32, 4, 2), "64x16": Tile(64, 16, 4, 2)}


def error(made: Tensor, wanted: Tensor) -> float:
    """Return the largest difference over the largest value; that of NaN is NaN."""
    return float((made.float() - wanted).abs().max() / wanted.abs().max())


def main() -> None:
    TILES.update(SMALL)
    torch.manual_seed(0)
    found = {}
    places = list(zip([0, *ENDS.tolist()], ENDS.tolist(), strict=False))
    for tile in SMALL:
        for turned in (False, True):
            one = torch.randn(ROWS, INNER).half()
            other = torch.randn(len(ENDS), *((COLUMNS, INNER) if turned else (INNER, COLUMNS))).half()
            other = other.transpose(1, 2) if turned else other
            out = torch.full((ROWS, COLUMNS), float("nan")).half()
            multiply(one, other, ENDS, out, tile)
            assert out[ENDS[-1] :].isnan().all()
            wanted = torch.cat([one[a:b].float() @ each.float() for (a, b), each in zip(places, other, strict=True)])
            found[f"{tile} rows {turned}"] = error(out[: ENDS[-1]], wanted)
            rows = torch.randn(ROWS, COLUMNS).half()
            matrices = torch.full((len(ENDS), INNER, COLUMNS), float("nan")).half()
            matrices = matrices.transpose(1, 2).contiguous().transpose(1, 2) if turned else matrices
            multiply(one.t(), rows, ENDS, matrices, tile)
            wanted = torch.stack([one[a:b].float().t() @ rows[a:b].float() for a, b in places])
            found[f"{tile} matrices {turned}"] = error(matrices, wanted)
    for count, sums in ((150, 3), (40, 12)):  # in parts, and each at once; one sum is of nothing
        values, numbers = torch.randn(count, COLUMNS).half(), torch.randint(0, sums, (count,))
        ordered, order = numbers[numbers != 1].sort()
        starts = torch.searchsorted(ordered, torch.arange(sums + 1), out_int32=True)
        made = summed(values, torch.nonzero(numbers != 1).flatten()[order], starts, sums)
        wanted = torch.stack([values[(numbers == row) & (numbers != 1)].float().sum(0) for row in range(sums)])
        found[f"{sums} sums of rows"] = error(made, wanted)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
