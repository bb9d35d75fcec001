"""Grouped products that are written where they are told, as a call that Inductor leaves as it is."""

import torch
from torch import Tensor, library

from autotuner.kernels.torch.grouped import grouped_product


@library.custom_op("autotuner::grouped_product_into", mutates_args={"out"})
def _into(one: Tensor, other: Tensor, ends: Tensor, out: Tensor, tile: str) -> None:
    if not one.is_cuda:
        out.copy_(grouped_product(one, other, ends))
        return
    from autotuner.kernels.triton.grouped import multiply

    multiply(one, other, ends, out, tile)


@_into.register_fake
def _written(one: Tensor, other: Tensor, ends: Tensor, out: Tensor, tile: str) -> None:
    return


grouped_product_into = torch.ops.autotuner.grouped_product_into.default
"""Write a grouped product into `out`; on a CUDA device by Triton's programs, in tiles of a name."""
