"""Prints, as JSON, errors of attention over packed tokens by Triton programs that its interpreter runs on the CPU.

`TRITON_INTERPRET=1` has to be set before Triton is imported.

    python -m tests.kernels.interpreted_packed
"""

import json

import torch

from tests.kernels.calls import faults
from tests.kernels.packed_cases import CASES, errors, masks_differ
from tests.kernels.packed_operators import calls_of, packed_graph

if __name__ == "__main__":
    found = {name: errors(case, torch.float32, "cpu") for name, case in CASES.items()}
    found["float16"] = errors(CASES["causal, dropout"], torch.float16, "cpu")
    found["float16, bias"] = errors(CASES["bias of all distances"], torch.float16, "cpu")
    masks = masks_differ(CASES["causal, dropout"], "cpu")
    operators = faults(
        [
            *calls_of(packed_graph("float32", rows=70, dropped=0.25), "triton"),
            *calls_of(packed_graph("float16", rows=70, shared=2), "triton"),
            *calls_of(packed_graph("float32", rows=70, dropped=0.25, bias="dn"), "triton"),
            *calls_of(packed_graph("float16", rows=70, shared=2, bias="nd"), "triton"),
        ]
    )
    print(json.dumps({"errors": found, "masks": masks, "operators": operators}))
