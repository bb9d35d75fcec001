"""Prints, as JSON, what Triton programs that round rows make otherwise than torch, on the CPU by Triton's interpreter.

`TRITON_INTERPRET=1` has to be set before Triton is imported. The interpreter (3.7) loses the carry of a mantissa that
is rounded up to the next power of two, rounds halves up, and cuts subnormal numbers off, so these are not compared.

    python -m tests.kernels.interpreted_fp8
"""

import json

import torch
from torch import Tensor

from autotuner.kernels.torch.fp8 import scaled
from autotuner.kernels.triton.fp8 import round_rows

MANTISSA, REST, HALF, NORMAL = 7, 0xFFFFF, 0x80000, 2.0**-6
"""Bits of a mantissa; bits that a float32 has beyond these, and half a step of them; the least normal number."""


def differing(matrix: Tensor) -> dict[str, float]:
    """Return how many numbers differ, of how many, and the largest difference of scales."""
    numbers, scales = round_rows(matrix)
    wanted, factors = scaled(matrix, (1,))
    bits, own = wanted.view(torch.uint8).int(), numbers.view(torch.uint8).int()
    exact = matrix.float() / factors
    compared = ((bits & MANTISSA) != 0) & ((exact.view(torch.int32) & REST) != HALF) & (exact.abs() >= NORMAL)
    return {
        "differ": int((own != bits)[compared].sum()),
        "compared": int(compared.sum()),
        "scales": float((scales - factors).nan_to_num(-1.0, 1e9).abs().max()),
        "is_contiguous": numbers.is_contiguous(),
    }


def main() -> None:
    torch.manual_seed(0)
    found: dict[str, dict[str, float]] = {}
    lost: dict[str, list[bool]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for rows, columns in ((70, 48), (3, 5000), (64, 128)):
            matrix = torch.randn(rows, columns).mul(10.0 ** torch.randint(-6, 6, (rows, 1))).to(dtype)
            matrix[1] = 0
            found[f"{dtype} {rows}x{columns} rows"] = differing(matrix)
            found[f"{dtype} {rows}x{columns} part of wider rows"] = differing(matrix[:, : columns - 16])
            found[f"{dtype} {rows}x{columns} columns"] = differing(matrix.t().contiguous().t())
    odd = torch.randn(2, 2, 32)
    odd[0, 0, 3], odd[1, 1, 5] = float("nan"), float("inf")
    for name, matrix in (("rows", odd[0]), ("columns", odd[1].t().contiguous().t())):
        numbers, scales = round_rows(matrix)
        read = numbers.float() * scales
        lost[name] = [bool((~row.isfinite()).any()) for row in read]
    print(json.dumps({"found": found, "lost": lost}))


if __name__ == "__main__":
    main()
