"""Launches Triton's programs of grouped products."""

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from autotuner.errors import KernelError
from autotuner.kernels.rules.in_place import INNER, TILES
from autotuner.kernels.triton.grouped_programs import columns_by_rows, rows_by_matrices


def multiply(one: Tensor, other: Tensor, ends: Tensor, out: Tensor, tile: str) -> None:
    """Write a grouped product, as `autotuner.kernels.torch.grouped` has it, into a tensor that lies in any way.

    Args:
        tile: of the result, a name of `autotuner.kernels.rules.in_place.TILES`.

    Raises:
        KernelError: an operand lies in a way that descriptors do not take.
    """
    size, groups = TILES[tile], len(ends)
    options = {"num_warps": size.warps, "num_stages": size.stages}
    if other.ndim == 3:
        rows, inner, columns = len(one), *other.shape[1:]
        turned = other.stride(1) == 1
        matrices = (other.transpose(1, 2) if turned else other).flatten(0, 1)
        tiles = rows // size.rows + groups
        right = (size.columns, INNER) if turned else (INNER, size.columns)
        rows_by_matrices[(tiles * triton.cdiv(columns, size.columns),)](
            _described(one, (size.rows, INNER)), _described(matrices, right), out, ends, *out.stride(),
            groups, tiles, columns, inner,
            ROWS=size.rows, COLUMNS=size.columns, INNER=INNER, GROUPS=triton.next_power_of_2(groups), TURNED=turned,
            **options,
        )  # fmt: skip
        return
    upright = one.t()
    rows, columns = one.shape[0], other.shape[1]
    columns_by_rows[(triton.cdiv(rows, size.rows) * triton.cdiv(columns, size.columns), groups)](
        _described(upright, (INNER, size.rows)), _described(other, (INNER, size.columns)), out, ends, upright, other,
        upright.stride(0), other.stride(0), *out.stride(), rows, columns,
        ROWS=size.rows, COLUMNS=size.columns, INNER=INNER, **options,
    )  # fmt: skip


def _described(matrix: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    step, inner = matrix.stride()
    if inner != 1 or step * matrix.element_size() % 16 or matrix.data_ptr() % 16:
        raise KernelError(
            f"a descriptor takes contiguous rows that begin at multiples of 16 bytes, not strides of {step} and {inner}"
        )
    return TensorDescriptor.from_tensor(matrix, list(block))
