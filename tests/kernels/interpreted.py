"""Prints, as JSON, what is wrong with attention by Triton programs where Triton's interpreter runs them on the CPU.

`TRITON_INTERPRET=1` has to be set before Triton is imported, and stays for a whole process. The layers are of float16,
which the interpreter multiplies; it does not multiply bfloat16.

    python -m tests.kernels.interpreted
"""

import json
from collections.abc import Mapping

import torch

from autotuner.ir.records import Call, Candidate, Scalar
from autotuner.kernels import KERNELS
from autotuner.kernels.rules.attention_triton import BACKWARD_PARAMS, FORWARD_PARAMS
from autotuner.space.fusion import covers
from tests.kernels.calls import faults, layer, prepare

NAMES = {"triton_attention": FORWARD_PARAMS, "triton_attention_grad": BACKWARD_PARAMS}
STACKED = "ab*cd"
WORDS = {"b": 2, "l": 96, "h": 32, "n": 2, "p": 16, "f": 32}
"""Rows and keys that tiles do not divide, and whole words of bits."""
ODD = WORDS | {"l": 37}
CASES: Mapping[str, tuple[Mapping[str, int], Mapping[str, Scalar]]] = {
    "dropout": (WORDS, {"p": 0.25}),
    "causal": (WORDS, {"p": 0.25, "model": "gpt-block"}),
    "key padding": (WORDS, {"p": 0.25, "attention_mask": True}),
    "odd": (ODD, {"p": 0.0}),
    "odd and causal": (ODD, {"p": 0.0, "model": "gpt-block"}),
    "odd and key padding": (ODD, {"p": 0.0, "attention_mask": True}),
    "whole tiles": (WORDS | {"b": 1, "l": 128}, {"p": 0.1}),
}


def calls(extents: Mapping[str, int], dtype: str, *, wide: bool = False, **options: Scalar) -> dict[str, list[Call]]:
    """Return two calls of each kernel, with tiles of 64 rows, in a layer, as far as its rule admits them.

    They have its last layouts, and its first with query, key and value in one stack.
    """
    graph = layer(extents, dtype, **options)  # type: ignore[arg-type]
    named = {operator.name: operator for operator in graph.operators}
    found: dict[str, list[Call]] = {}
    for cover in covers(graph, tuple(NAMES), 8):
        members = [named[name] for name in cover.recomputed + cover.operators]
        subgraph = graph.subgraph(members, cover.inputs, cover.outputs)
        for kernel in cover.kernels:
            params = tuple(
                (name, {"rows": 64, "columns": 128 if wide else 64, "warps": 4, "stages": 2}[name.split("_")[-1]])
                for name in NAMES[kernel]
            )
            first, last = list(KERNELS[kernel].layouts(subgraph))
            place = 0 if kernel == "triton_attention" else 1
            sliced = [f"{STACKED}@{index}/3" for index in range(3)]
            rows = (last, (*first[:place], *sliced, *first[place + 3 :]))
            candidates = (Candidate(kernel, row, params) for row in rows)
            found[kernel] = [Call(subgraph, c) for c in candidates if KERNELS[kernel].refuses(subgraph, c) is None]
    return found


def hidden(known: Mapping[str, list[Call]]) -> dict[str, str]:
    """Return what is not finite where a sequence hides all its keys by the least bfloat16, by kernel."""
    found = {}
    for kernel, own in known.items():
        prepared = prepare(own[0])
        mask = prepared.inputs[-1]
        assert mask is not None
        wide = torch.zeros(mask.shape, dtype=torch.bfloat16)
        wide[0] = torch.finfo(torch.bfloat16).min
        run = KERNELS[kernel].builder()(own[0], [*prepared.inputs[:-1], wide], prepared.outputs)
        run()
        if not all(bool(t.isfinite().all()) for t in prepared.outputs if t is not None and t.is_floating_point()):
            found[kernel] = "a result is not finite"
    return found


if __name__ == "__main__":
    made = {
        case: calls(extents, "float16", **options)  # type: ignore[arg-type]
        for case, (extents, options) in CASES.items()
    }
    assert all(len(own) == 2 for case in made.values() for own in case.values())
    made["wide tiles"] = calls(WORDS | {"b": 1, "l": 128}, "float16", wide=True, p=0.25)
    found = {f"{case}: {kernel}": faults(own) for case, known in made.items() for kernel, own in known.items()}
    found["all keys hidden"] = hidden(made["odd and key padding"])
    print(json.dumps(found))
