"""Prints, as JSON, errors of attention over packed tokens in every tile that is tried, by Triton's interpreter.

`TRITON_INTERPRET=1` has to be set before Triton is imported. Operands are of float16, which the interpreter multiplies;
those of float32 have tiles of their own.

    python -m tests.kernels.interpreted_packed_tiles
"""

import json

import torch

from tests.kernels.calls import faults
from tests.kernels.interpreted import patch_once
from tests.kernels.packed_cases import TILED_CASES, errors, tried_tiles
from tests.kernels.packed_operators import kinds_of, packed_graph, tuned_calls_of

if __name__ == "__main__":
    patch_once()
    found = {
        f"{name}: {number}": max(errors(case, torch.float16, "cpu", tiles).values())
        for name, case in TILED_CASES.items()
        for number, tiles in enumerate(tried_tiles(case, torch.float16))
    }
    graphs = (packed_graph("float16", rows=150, dropped=0.25, shared=2), packed_graph("float16", rows=70, bias="nd"))
    calls = [call for graph in graphs for kind in kinds_of(graph) for call in tuned_calls_of(graph, kind)]
    print(json.dumps({"errors": found, "calls": len(calls), "faults": faults(calls)}))
