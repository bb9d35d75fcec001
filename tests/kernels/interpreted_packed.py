"""Prints, as JSON, errors of attention over packed tokens by Triton programs that its interpreter runs on the CPU.

`TRITON_INTERPRET=1` has to be set before Triton is imported.

    python -m tests.kernels.interpreted_packed
"""

import json

import torch

from tests.kernels.packed_cases import CASES, errors

if __name__ == "__main__":
    found = {name: errors(case, torch.float32, "cpu") for name, case in CASES.items()}
    found["float16"] = errors(CASES["causal, dropout"], torch.float16, "cpu")
    print(json.dumps(found))
