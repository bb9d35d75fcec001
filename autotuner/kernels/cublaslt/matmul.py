"""Matrix products through nvmath's bindings of cuBLASLt, on torch's tensors and streams.

cuBLASLt's matrices are column-major. A product whose rows are contiguous is asked for transposed, operands swapped.

Source:
    cuBLAS library documentation, cublasLtMatmul; nvmath-python, nvmath.bindings.cublasLt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from autotuner.errors import KernelError
from autotuner.ir.records import Call
from autotuner.kernels.rules.cublaslt import (
    bias_beside_gelu,
    gelu_of,
    product_of,
    product_under_gelu,
    saved_input,
    summed_operand,
)
from autotuner.kernels.torch import contraction, stacked

Run = Callable[[], Any]

WORKSPACE_BYTES = 32 << 20
"""The most workspace that an algorithm may ask for: as much as cuBLAS itself is given on Hopper."""
SLACK_BYTES = 256
"""Some algorithms with an epilogue write a little further than the workspace that they ask for."""
ALIGNED_BYTES = 256
MOST_ALGORITHMS = 32

# Numbers of cudaDataType_t and cublasComputeType_t.
DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
COMPUTE_32F = 68
TRANSPOSED = 1
# Numbers of cublasLtEpilogue_t.
DEFAULT, BIAS, SUM_OF_A, SUM_OF_B = 1, 4, 256, 512
GELU_BIAS, GELU_SAVING_BIAS, GELU_GRAD, GELU_GRAD_SUM_OF_D = 36, 164, 192, 208


@dataclass(frozen=True)
class Matrix:
    """A column-major matrix, or one that is to be transposed: rows and columns as they are stored."""

    pointer: int
    rows: int
    columns: int
    leading: int
    transposed: bool = False


@dataclass(frozen=True)
class Epilogue:
    """An operation on a product before it is written.

    Args:
        number: of cublasLtEpilogue_t.
        vector: an element for each row of the column-major product: a bias, or where the gradient of one goes.
        saved: what GELU reads, written by GELU and read by its gradient. It lies like the product.
    """

    number: int = DEFAULT
    vector: Tensor | None = None
    saved: Tensor | None = None


NO_EPILOGUE = Epilogue()


@dataclass(frozen=True)
class Oriented:
    """A product as cuBLASLt sees it, and whether its operands are swapped."""

    a: Matrix
    b: Matrix
    d: Matrix
    swapped: bool


def oriented(a: Tensor, b: Tensor, c: Tensor) -> Oriented:
    """Return c = a b as a product whose result is column-major.

    Args:
        a, b, c: matrices of m x k, k x n and m x n, each with a contiguous axis.
    """
    swapped = c.stride(0) != 1 and c.shape[0] > 1
    if swapped:
        a, b, c = b.t(), a.t(), c.t()
    return Oriented(_operand(a), _operand(b), _operand(c), swapped)


def _operand(matrix: Tensor) -> Matrix:
    rows, columns = matrix.shape
    if matrix.stride(0) == 1 or rows == 1:
        return Matrix(matrix.data_ptr(), rows, columns, max(rows, matrix.stride(1) if columns > 1 else rows))
    return Matrix(matrix.data_ptr(), columns, rows, max(columns, matrix.stride(0)), transposed=True)


def matmul(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """One product, in the type of its operands or in float32."""
    return _product(call, *contraction.product_matrices(call, inputs, outputs))


def matmul_bias(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """A product with a bias as its epilogue."""
    a, b, c, term = contraction.with_term(call, inputs, outputs)
    return _product(call, a, b, c, _adding(a, b, c, term))


def matmul_bias_grad(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """A product, and the sum of one operand over the contracted axis, which is the gradient of a bias."""
    alone, tensors = _alone(call, inputs, outputs)
    count = len(alone.subgraph.inputs)
    a, b, c = contraction.product_matrices(alone, tensors[:count], tensors[count:])
    (total,) = (t for n, t in zip(call.subgraph.outputs, outputs, strict=True) if n not in alone.subgraph.outputs)
    return _product(call, a, b, c, _summing(call, a, b, c, total))


def matmul_bias_gelu_tanh(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """A product with a bias and GELU as its epilogue, which leaves what GELU reads where something else reads it."""
    a, b, c, vector, saved = _under_gelu(call, inputs, outputs)
    return _product(call, a, b, c, Epilogue(GELU_BIAS if saved is None else GELU_SAVING_BIAS, vector, saved))


def matmul_gelu_tanh_grad(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """A product with GELU's gradient as its epilogue."""
    a, b, c, _, saved = _under_gelu(call, inputs, outputs)
    return _product(call, a, b, c, Epilogue(GELU_GRAD, saved=saved))


def matmul_gelu_tanh_grad_bias_grad(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """The same, and the sum of its result, which is the gradient of the bias before GELU."""
    a, b, c, vector, saved = _under_gelu(call, inputs, outputs)
    return _product(call, a, b, c, Epilogue(GELU_GRAD_SUM_OF_D, vector, saved))


def stacked_matmul(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """One product over siblings, onto what is added to their sum."""
    a, b, c = stacked.product_matrices(call, inputs, outputs)
    return _product(call, a, b, c, addend=stacked.added_term(call, inputs, c))


def stacked_matmul_bias(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """One product over siblings with their biases as its epilogue."""
    a, b, c = stacked.product_matrices(call, inputs, outputs)
    return _product(call, a, b, c, _adding(a, b, c, stacked.added_term(call, inputs, c)))


def stacked_matmul_bias_grad(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """One product over siblings, and the gradients of their biases."""
    alone, tensors = _alone(call, inputs, outputs)
    count = len(alone.subgraph.inputs)
    a, b, c = stacked.product_matrices(alone, tensors[:count], tensors[count:])
    sums = [t for n, t in zip(call.subgraph.outputs, outputs, strict=True) if n not in alone.subgraph.outputs]
    return _product(call, a, b, c, _summing(call, a, b, c, stacked.whole(sums)))


def _alone(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Call, list[Tensor]]:
    """Return the product of a call with bias gradients, and its operands."""
    subgraph, candidate = product_of(call.subgraph, call.candidate)
    lying = dict(zip(call.subgraph.boundary, (*inputs, *outputs), strict=True))
    return Call(subgraph, candidate), [lying[number] for number in subgraph.boundary]


def _under_gelu(
    call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the matrices of a product under GELU or its gradient, the bias or its gradient, and what GELU reads."""
    subgraph, candidate = product_under_gelu(call.subgraph, call.candidate)
    lying = dict(zip(call.subgraph.boundary, (*inputs, *outputs), strict=True))
    operands = [lying[number] for number in subgraph.inputs]
    made = lying[gelu_of(call.subgraph).outputs[0]]
    a, b, c = contraction.product_matrices(Call(subgraph, candidate), operands, [made])
    bias, saved = bias_beside_gelu(call.subgraph), saved_input(call.subgraph)
    return a, b, c, lying[bias[0]] if bias else None, None if saved is None else lying[saved]


def _adding(a: Tensor, b: Tensor, c: Tensor, term: Tensor | None) -> Epilogue:
    """Return the epilogue that adds a bias, seen as a matrix like c.

    Raises:
        KernelError: the bias runs otherwise than the library's.
    """
    if term is None:
        return NO_EPILOGUE
    along = term.t() if oriented(a, b, c).swapped else term
    if along.stride(1) != 0 or along.stride(0) != 1:
        raise KernelError("cuBLASLt adds a bias along the contiguous axis of a product, and this one runs otherwise")
    return Epilogue(BIAS, term)


def _summing(call: Call, a: Tensor, b: Tensor, c: Tensor, total: Tensor) -> Epilogue:
    """Return the epilogue that sums an operand over the contracted axis."""
    first = (summed_operand(call.subgraph) == 0) != oriented(a, b, c).swapped
    return Epilogue(SUM_OF_A if first else SUM_OF_B, total)


def _product(
    call: Call, a: Tensor, b: Tensor, c: Tensor, epilogue: Epilogue = NO_EPILOGUE, *, addend: Tensor | None = None
) -> Run:
    """Return a product with the algorithm that the candidate names, onto an addend that lies like c, if there is one.

    Raises:
        KernelError: the library has no such epilogue or algorithm for these operands.
    """
    wanted = dict(call.candidate.params).get("algorithm", 0)
    if type(wanted) is not int or wanted < 0:
        raise KernelError(f"algorithm is {wanted!r}: write a place in the library's list, from 0")
    types = (DATA_TYPES[a.dtype], DATA_TYPES[c.dtype])
    launch = _prepared(oriented(a, b, c), types, epilogue, wanted, c.device, addend)
    return lambda: launch.queue(c.device)


@dataclass(frozen=True, eq=False)
class Launch:
    """A call of the library, less its workspace and stream, and what its pointers point to."""

    bindings: Any
    arguments: tuple[int, ...]
    workspace_bytes: int
    kept: tuple[Any, ...]

    def queue(self, device: torch.device) -> None:
        """Queue the product on the current stream, with a workspace of that stream's."""
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=device)
        stream = torch.cuda.current_stream(device).cuda_stream
        self.bindings.matmul(*self.arguments, workspace.data_ptr(), self.workspace_bytes, stream)


@cache
def _handle(device_index: int) -> tuple[Any, int]:
    """Return the library and a handle of it on a device.

    Raises:
        KernelError: nvmath-python is not installed.
    """
    try:
        from nvmath.bindings import cublasLt
    except ImportError as error:
        raise KernelError(f"cuBLASLt is reached through nvmath-python, which cannot be imported: {error}") from None
    with torch.cuda.device(device_index):
        return cublasLt, cublasLt.create()


def _prepared(
    seen: Oriented,
    types: tuple[int, int],
    epilogue: Epilogue,
    wanted: int,
    device: torch.device,
    addend: Tensor | None,
) -> Launch:
    """Return a product of operands of the first type, written in the second."""
    library, handle = _handle(device.index or 0)
    attribute = library.MatmulDescAttribute
    descriptor = library.matmul_desc_create(COMPUTE_32F, DATA_TYPES[torch.float32])

    def describe(name: int, value: int, kind: Any) -> None:
        held = np.array([value], dtype=kind)
        library.matmul_desc_set_attribute(descriptor, name, held.ctypes.data, held.itemsize)

    describe(attribute.TRANSA, TRANSPOSED if seen.a.transposed else 0, np.int32)
    describe(attribute.TRANSB, TRANSPOSED if seen.b.transposed else 0, np.int32)
    if epilogue.number != DEFAULT:
        describe(attribute.EPILOGUE, epilogue.number, np.uint32)
    if epilogue.vector is not None:
        describe(attribute.BIAS_POINTER, epilogue.vector.data_ptr(), np.uint64)
    if epilogue.saved is not None:
        describe(attribute.EPILOGUE_AUX_POINTER, epilogue.saved.data_ptr(), np.uint64)
        describe(attribute.EPILOGUE_AUX_LD, seen.d.leading, np.int64)
    layouts = [
        library.matrix_layout_create(data_type, each.rows, each.columns, each.leading)
        for each, data_type in ((seen.a, types[0]), (seen.b, types[0]), (seen.d, types[1]))
    ]
    preference = library.matmul_preference_create()
    asked: list[tuple[int, int, Any]] = [
        (library.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES, WORKSPACE_BYTES, np.uint64)
    ]
    for name, each in (("A", seen.a), ("B", seen.b), ("C", seen.d), ("D", seen.d)):
        lies = min(ALIGNED_BYTES, each.pointer & -each.pointer)
        asked.append((getattr(library.MatmulPreferenceAttribute, f"MIN_ALIGNMENT_{name}_BYTES"), lies, np.uint32))
    for option, value, kind in asked:
        held = np.array([value], dtype=kind)
        library.matmul_preference_set_attribute(preference, option, held.ctypes.data, held.itemsize)
    found, count = library.MatmulHeuristicResult(MOST_ALGORITHMS), np.zeros(1, dtype=np.int32)
    first, second, result = layouts
    try:
        library.matmul_algo_get_heuristic(
            handle, descriptor, first, second, result, result, preference, MOST_ALGORITHMS, found.ptr, count.ctypes.data
        )
    except library.cuBLASLtError as error:
        raise KernelError(f"cuBLASLt has no algorithm for this product and epilogue: {error}") from None
    finally:
        library.matmul_preference_destroy(preference)
    if wanted >= count[0]:
        raise KernelError(f"cuBLASLt offers {count[0]} algorithms for this product; there is no number {wanted}")
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    size = library.matmul_heuristic_result_dtype.itemsize
    arguments = (
        handle, descriptor, one.ctypes.data, seen.a.pointer, first, seen.b.pointer, second,
        (zero if addend is None else one).ctypes.data, seen.d.pointer if addend is None else addend.data_ptr(), result,
        seen.d.pointer, result, found.ptr + wanted * size,
    )  # fmt: skip
    needed = int(found.workspace_size[wanted])
    plan = Launch(library, arguments, needed + SLACK_BYTES if needed else 0, (found, one, zero))
    finalize(plan, _destroy, library, descriptor, layouts)
    return plan


def _destroy(library: Any, descriptor: int, layouts: Sequence[int]) -> None:
    library.matmul_desc_destroy(descriptor)
    for layout in layouts:
        library.matrix_layout_destroy(layout)
