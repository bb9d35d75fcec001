"""Copying a tensor from one form to another."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from autotuner.kernels.geometry import operand_letters
from autotuner.records import Call


def copy(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    (source,), (target,) = inputs, outputs
    have, want = operand_letters(call.subgraph.nodes[0])
    turned = source.permute([have.index(letter) for letter in want])
    return lambda: target.copy_(turned)
