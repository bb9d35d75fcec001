"""Products of float32 matrices by this package's own kernel, and what is done to a product before it leaves the cache.

The kernel copies columns of the second factor, a panel at a time, in the order in which it reads them. It reads the
first factor, and writes the product, as they lie.
"""

from collections.abc import Callable, Sequence
from ctypes import Structure, byref, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.records import Call
from autotuner.kernels.cpp.compiled import function
from autotuner.kernels.geometry import operand_letters
from autotuner.kernels.rules.cublaslt import bias_beside_gelu, gelu_of, product_under_gelu, saved_input
from autotuner.kernels.torch import contraction, stacked

Run = Callable[[], Any]

EPILOGUES = ("", "gelu_erf", "gelu_tanh", "gelu_erf_grad", "gelu_tanh_grad")
"""In the order of the source's enumeration."""


class StridedMatrix(Structure):
    """A pointer and strides in elements."""

    _fields_ = (("data", c_void_p), ("batch", c_int64), ("row", c_int64), ("column", c_int64))


class Product(Structure):
    """Operands of the kernel, in the order of the source's structure of this name."""

    _fields_ = (
        ("batch", c_int64), ("m", c_int64), ("n", c_int64), ("k", c_int64), ("a", StridedMatrix),
        ("b", StridedMatrix), ("c", StridedMatrix), ("added", StridedMatrix), ("saved", StridedMatrix),
        ("epilogue", c_int32),
    )  # fmt: skip


@dataclass(frozen=True)
class BehindProduct:
    """Additions and activation that follow a product.

    Args:
        kind: "" for nothing, GELU, or its gradient.
        added: to the product at first, seen as a matrix like it.
        saved: what GELU reads, written by GELU and read by its gradient. It lies like the product.
    """

    kind: str = ""
    added: Tensor | None = None
    saved: Tensor | None = None


def matmul(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """One product, batched where the spec has batch axes."""
    return matrix_product(*contraction.product_matrices(call, inputs, outputs))


def matmul_plus(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """A product added to a bias or to a tensor like the product itself."""
    a, b, c, term = contraction.with_term(call, inputs, outputs)
    return matrix_product(a, b, c, BehindProduct(added=term))


def matmul_gelu(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """A product, a bias where there is one, and GELU or its gradient; what GELU reads is left for its gradient."""
    subgraph, candidate = product_under_gelu(call.subgraph, call.candidate)
    lying = dict(zip(call.subgraph.boundary, (*inputs, *outputs), strict=True))
    gelu, saved, bias = gelu_of(call.subgraph), saved_input(call.subgraph), bias_beside_gelu(call.subgraph)
    operands, made = [lying[number] for number in subgraph.inputs], lying[gelu.outputs[0]]
    alone = Call(subgraph, candidate)
    a, b, c = contraction.product_matrices(alone, operands, [made])
    beside = None if saved is None else lying[saved].as_strided(c.shape, c.stride())
    term = None if bias is None else _along_product(alone, lying[bias[0]], bias[1], c, made)
    return matrix_product(a, b, c, BehindProduct(gelu.kind, term, beside))


def _along_product(alone: Call, bias: Tensor, letters: str, c: Tensor, made: Tensor) -> Tensor:
    """View a bias, whose axes have these letters of the product, as a matrix like it."""
    step = dict(zip(letters, bias.stride(), strict=True))
    own = operand_letters(alone.subgraph.nodes[0])[2]
    return contraction.like_product(alone, bias.as_strided(made.shape, [step.get(x, 0) for x in own]), c, made)


def stacked_matmul(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """One product over siblings, onto their biases or what is added to their sum."""
    a, b, c = stacked.product_matrices(call, inputs, outputs)
    return matrix_product(a, b, c, BehindProduct(added=stacked.added_term(call, inputs, c)))


def matrix_product(a: Tensor, b: Tensor, c: Tensor, epilogue: BehindProduct | None = None) -> Run:
    """Return what multiplies float32 matrices of m x k and k x n, or batches of them, into a third.

    Raises:
        KernelError: there is no compiler, or it has failed.
    """
    epilogue = epilogue or BehindProduct()
    tensors = (a, b, c, epilogue.added, epilogue.saved)
    added, saved = epilogue.added, epilogue.saved
    if c.stride(-1) != 1 and c.shape[-1] > 1:  # the kernel writes rows: the transposed product is the same
        a, b, c = b.mT, a.mT, c.mT
        added, saved = (None if each is None else each.mT for each in (added, saved))
    batch = c.shape[0] if c.dim() == 3 else 1
    structure = Product(
        batch, c.shape[-2], c.shape[-1], a.shape[-1], _matrix(a), _matrix(b), _matrix(c), _matrix(added),
        _matrix(saved), EPILOGUES.index(epilogue.kind),
    )  # fmt: skip
    run, pointer, threads = function("matmul", "matmul", Product), byref(structure), torch.get_num_threads

    def multiply(_kept: object = (structure, tensors)) -> None:
        run(pointer, threads())

    return multiply


def _matrix(tensor: Tensor | None) -> StridedMatrix:
    if tensor is None:
        return StridedMatrix(None, 0, 0, 0)
    batch = tensor.stride(0) if tensor.dim() == 3 else 0
    return StridedMatrix(tensor.data_ptr(), batch, tensor.stride(-2), tensor.stride(-1))
