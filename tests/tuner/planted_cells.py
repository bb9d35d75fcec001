"""A kernel with launch parameters, whose time depends on them as made up here; for tests of searching a cell."""

import time
from collections.abc import Callable, Sequence
from math import log2

import torch
from torch import Tensor

from autotuner.ir.records import Call, Candidate, Scalar, Subgraph
from autotuner.kernels.registry import KERNELS, Kernel
from autotuner.kernels.rules.elementwise import layouts_differ, same_layouts

LISTS: dict[str, list[Scalar]] = {
    "block": [16, 32, 64, 128, 256, 512, 1024, 2048],
    "warps": [1, 2, 4, 8],
    "stages": [1, 2, 3, 4],
    "order": ["rows", "columns", "tiles", "halves", "quarters", "eighths", "snake", "hilbert"],
}
BEST = {"block": 256, "warps": 4, "stages": 3, "order": "snake"}
BEST_US = 100.0
REGISTERS = 4096


def cost_us(call: Call) -> float:
    """Return the made-up time of a call: the least for `BEST`, a step away from it is 10 to 60 % more."""
    params = dict(call.candidate.params)
    away = (
        0.3 * abs(log2(float(params["block"]) / 256)), 0.2 * abs(log2(float(params["warps"]) / 4)),
        0.1 * abs(int(params["stages"]) - 3), 0.0 if params["order"] == "snake" else 0.6,
    )  # fmt: skip
    return BEST_US * (1 + sum(away))


def too_many_registers(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Refuse operands in different layouts, and 96 of the 1,024 combinations."""
    params = dict(candidate.params)
    wanted = int(params["block"]) * int(params["warps"])
    return f"{wanted} registers are too many" if wanted > REGISTERS else layouts_differ(subgraph, candidate)


def tiled(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], object]:
    took_s = cost_us(call) / 1e6

    def run() -> None:
        until = time.perf_counter() + took_s
        torch.add(inputs[0], inputs[1], out=outputs[0])
        while time.perf_counter() < until:
            pass

    return run


KERNELS.add(Kernel("planted_tiled", ("bias",), "planted_cells:tiled", too_many_registers, layouts=same_layouts))
