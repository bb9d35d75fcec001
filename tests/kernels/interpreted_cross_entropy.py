"""Prints, as JSON, largest errors of cross entropy by Triton's program that its interpreter runs on the CPU.

`TRITON_INTERPRET=1` has to be set before Triton is imported. Each case is compared with the function for any device:
losses and gradients, with rows that are part of wider ones, and words that fill no block.

    python -m tests.kernels.interpreted_cross_entropy
"""

import json
from itertools import product

import torch

from autotuner.kernels.torch import cross_entropy as plain
from autotuner.kernels.torch.cross_entropy import CrossEntropy
from autotuner.kernels.triton import cross_entropy as by_triton

ROWS, WORDS = 7, 300
CASES = {
    "mean": CrossEntropy(),
    "sum, another label ignored": CrossEntropy(ignored=0, mean=False),
    "smoothed": CrossEntropy(smoothing=0.1),
    "factor": CrossEntropy(factor=0.25),
    "cap": CrossEntropy(factor=0.5, cap=3.0),
    "negative cap, smoothed": CrossEntropy(factor=0.5, cap=-3.0, smoothing=0.2),
}


def main() -> None:
    by_triton.BLOCK = 64
    torch.manual_seed(0)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, settings in CASES.items():
            for gradient, squared in product((False, True), repeat=2):
                wide = torch.randn(ROWS, WORDS + 20).mul_(4).to(dtype)
                logits, twin = wide[:, :WORDS], wide[:, :WORDS].clone()
                labels = torch.randint(1, WORDS, (ROWS,))
                labels[2] = settings.ignored
                labels[3] = WORDS - 1
                if not settings.smoothing:  # words that are masked, a whole block among them
                    wide[0, :64] = wide[1, -90:] = float("-inf")
                    twin = wide[:, :WORDS].clone()
                    labels[:2] = 100
                weight = torch.tensor(1 / 6) if settings.mean else None
                given = (labels, weight, settings)
                squares = torch.rand(ROWS) if squared else None
                made = by_triton.rows_of_cross_entropy(logits, *given, gradient=gradient, squares=squares)
                wanted = plain.rows_of_cross_entropy(twin, *given, gradient=gradient, squares=squares)
                assert [each is None for each in made] == [each is None for each in wanted] == [False, not squared]
                pairs = zip(made, wanted, strict=True)
                error = max(apart(one, other) for one, other in pairs if one is not None and other is not None)
                if gradient:
                    error = max(error, apart(logits, twin))
                case = f"{name}, {dtype}, {'gradient' if gradient else 'loss'}"
                found[f"{case}{', squares' if squared else ''}"] = error
    print(json.dumps(found))


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


if __name__ == "__main__":
    main()
