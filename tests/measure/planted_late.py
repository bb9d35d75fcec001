"""A kernel's builder that says which processes import it, in the file that PLANTED_LATE names."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from autotuner.ir.records import Call

with Path(os.environ["PLANTED_LATE"]).open("a") as file:
    file.write(f"{os.getpid()}\n")


def late_compiled(_call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], object]:
    return lambda: torch.add(inputs[0], inputs[1], out=outputs[0])
