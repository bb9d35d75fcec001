"""Launches Triton's programs that round rows to 8-bit floats."""

import torch
import triton
from torch import Tensor

from autotuner.kernels.torch.formats import SMALLEST
from autotuner.kernels.torch.fp8 import FP8, LARGEST
from autotuner.kernels.triton.fp8_programs import across_rows, along_rows, largest_across

BLOCK_MAX = 4096
"""Elements of a row that a program holds at once."""
TILE = 64


def round_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of a matrix in 8-bit floats, contiguous, and what 1 stands for in each, a column of float32.

    Args:
        matrix: m x k, with a contiguous axis.
    """
    rows, columns = matrix.shape
    numbers = torch.empty(rows, columns, dtype=FP8, device=matrix.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=matrix.device)
    bounds = {"LARGEST": LARGEST, "SMALLEST": SMALLEST}
    if matrix.stride(1) == 1:
        block = min(BLOCK_MAX, triton.next_power_of_2(columns))
        warps = 4 if block < BLOCK_MAX else 8
        along_rows[(rows,)](matrix, numbers, scales, matrix.stride(0), columns, **bounds, BLOCK=block, num_warps=warps)
        return numbers, scales
    largest = torch.zeros(rows, dtype=torch.int32, device=matrix.device)
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    sizes = {"ROWS": TILE, "COLUMNS": TILE, "num_warps": 4}
    largest_across[grid](matrix, largest, matrix.stride(1), rows, columns, **sizes)
    across_rows[grid](matrix, largest, numbers, scales, matrix.stride(1), rows, columns, **bounds, **sizes)
    return numbers, scales
