"""Grouped products: rows that lie in groups, each group with a matrix of its own, as the experts of a layer have.

    rows (S, K), matrices (E, K, N)  ->  (S, N)       group e is rows[ends[e - 1]:ends[e]]; the first begins at 0
    columns (K, S), rows (S, N)      ->  (E, K, N)    the products of each group's columns with its rows

These are the two forms of `aten._grouped_mm` that gradients of the first one need. ATen's own call computes them in
bfloat16 on a CUDA device. Elsewhere it takes neither float64, which a reference needs, nor rows of any length: there
each group is a product of its own, of sizes that the host reads.
"""

from typing import Any

import torch
from torch import Tensor, library


@library.custom_op("autotuner::grouped_product", mutates_args=())
def _product(one: Tensor, other: Tensor, ends: Tensor) -> Tensor:
    if one.is_cuda and one.dtype == torch.bfloat16:
        found: Tensor = torch.ops.aten._grouped_mm.default(one, other, ends)
        return found
    by_rows, begin = other.ndim == 3, 0
    made: Tensor = _empty(one, other, ends).zero_()  # rows behind the last group, and groups without rows, are zeros
    for group, end in enumerate(ends.tolist()):
        if end > begin and by_rows:
            torch.mm(one[begin:end], other[group], out=made[begin:end])
        elif end > begin:
            torch.mm(one[:, begin:end], other[begin:end], out=made[group])
        begin = end
    return made


@_product.register_fake
def _empty(one: Tensor, other: Tensor, ends: Tensor) -> Tensor:
    if one.ndim != 2 or other.ndim not in (2, 3) or one.shape[1] != other.shape[-2] or one.dtype != other.dtype:
        raise ValueError(
            f"a grouped product takes rows (S, K) and matrices (E, K, N), or columns (K, S) and rows (S, N), of one "
            f"type; not {list(one.shape)} in {one.dtype} and {list(other.shape)} in {other.dtype}"
        )
    if ends.dtype not in (torch.int32, torch.int64) or ends.ndim != 1 or (other.ndim == 3 and len(other) != len(ends)):
        raise ValueError(f"the ends of the groups are integers, one for each; not {list(ends.shape)} in {ends.dtype}")
    shape = (len(one), other.shape[-1])
    made: Tensor = one.new_empty(shape if other.ndim == 3 else (len(ends), *shape))
    return made


class _Grouped(torch.autograd.Function):
    """A grouped product of rows with matrices, which `torch.func.vjp` can differentiate."""

    @staticmethod
    def forward(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        made: Tensor = _product(rows, matrices, ends)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices, ends = ctx.saved_tensors
        of_rows = _product(grad, matrices.transpose(-2, -1), ends) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_rows, None, None
        if matrices.stride(-2) == 1:  # in the order of their memory, so that nobody copies them
            return of_rows, _product(grad.t(), rows, ends).transpose(-2, -1), None
        return of_rows, _product(rows.t(), grad, ends), None


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return each row times the matrix of its group; rows behind the last group may hold anything.

    Args:
        rows: (S, K), those of one group behind each other.
        matrices: (E, K, N), one for each group.
        ends: (E,), the number of rows up to the end of each group.
    """
    found: Tensor = _Grouped.apply(rows, matrices, ends)  # type: ignore[no-untyped-call]
    return found


def histogram(numbers: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count numbers as `aten.histc` does, integers on a CPU as well, which ATen counts on CUDA devices alone.

    Returns:
        (bins,), of the type of the numbers.
    """
    if numbers.is_floating_point() or numbers.is_cuda:
        counts: Tensor = torch.ops.aten.histc.default(numbers, bins, min, max)
    else:
        counts = torch.ops.aten.histc.default(numbers.double(), bins, min, max).to(numbers.dtype)
    return counts


def sorted_bytes(
    numbers: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """Sort integers between 0 and 255, as `aten.sort.stable` does, in fewer passes of its radix sort.

    Returns:
        The numbers in order, of their type, and their places.
    """
    values, places = torch.sort(numbers.to(torch.uint8), stable=bool(stable), dim=dim, descending=descending)
    return values.to(numbers.dtype), places
