"""Storages of tensors: who else has them."""

import torch
from torch import Tensor

ALONE = 2
"""Uses of the memory of a tensor that shares it with no other: by the tensor, and by Python."""


def is_alone(tensor: Tensor) -> bool:
    """Say whether a tensor fills its memory, and no other tensor has a part of that."""
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.nbytes and torch._C._storage_Use_Count(storage._cdata) <= ALONE
