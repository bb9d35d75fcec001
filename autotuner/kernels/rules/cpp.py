"""Own CPU kernels in C++: products with what follows them, and attention, of float32 operands."""

from functools import partial

from autotuner.ir.records import Candidate, Subgraph
from autotuner.kernels.geometry import forms_by_number
from autotuner.kernels.patterns import Siblings
from autotuner.kernels.registry import KERNELS, Kernel, Refuses
from autotuner.kernels.rules.attention import (
    CAUSAL_FORWARD,
    FORWARD,
    attention_grads,
    attention_layouts,
    attentions,
    features_scattered,
    variants,
)
from autotuner.kernels.rules.contraction import not_one_product, product_layouts
from autotuner.kernels.rules.cublaslt import (
    bias_in_another_order,
    gelu_layouts,
    gelu_of,
    product_under_gelu,
    saved_input,
)
from autotuner.kernels.rules.stacked import not_one_stacked_product, stacked_product_layouts

_MATMUL = "autotuner.kernels.cpp.matmul"
_ATTENTION = "autotuner.kernels.cpp.attention"

UNDROPPED = tuple(kinds for kinds in variants(FORWARD, CAUSAL_FORWARD) if "dropout" not in kinds)
"""Kinds of attention that are computed: with a scale and without, causal or not."""


def _of_float32(rule: Refuses) -> Refuses:
    """Put before a rule that all operands are float32."""

    def refuses(subgraph: Subgraph, candidate: Candidate) -> str | None:
        other = sorted({subgraph.tensors[number].dtype for number in subgraph.boundary} - {"float32"})
        return f"it computes in float32; an operand is {other[0]}" if other else rule(subgraph, candidate)

    return refuses


def not_under_gelu(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why this candidate is not one product with GELU or its gradient behind it, or None if it is."""
    alone, bare = product_under_gelu(subgraph, candidate)
    reason = not_one_product(alone, bare)
    if reason:
        return reason
    forms, saved, made = forms_by_number(subgraph, candidate), saved_input(subgraph), gelu_of(subgraph).outputs[0]
    if saved is not None and forms[saved].nameless() != forms[made].nameless():
        return f"GELU's input lies as {forms[saved]}, what is made of it as {forms[made]}"
    return bias_in_another_order(subgraph, candidate)


_single = partial(
    Kernel, refuses=_of_float32(not_one_product), layouts=product_layouts, anchors=True, pitched=True
)  # fmt: skip
_gelu = partial(
    Kernel, runs=f"{_MATMUL}:matmul_gelu", refuses=_of_float32(not_under_gelu), layouts=gelu_layouts, anchors=True
)  # fmt: skip
_stacked = partial(
    Kernel, covers=(), runs=f"{_MATMUL}:stacked_matmul", refuses=_of_float32(not_one_stacked_product),
    layouts=stacked_product_layouts, anchors=True, merges=False,
)  # fmt: skip
_attention = partial(
    Kernel, covers=(), refuses=_of_float32(features_scattered), layouts=attention_layouts, anchors=True, merges=False,
    pitched=True,
)  # fmt: skip
KERNELS.add(
    _single("cpp_matmul", ("contraction",), f"{_MATMUL}:matmul"),
    _single("cpp_matmul_bias", ("contraction", "bias"), f"{_MATMUL}:matmul_plus"),
    _single("cpp_matmul_add", ("contraction", "add"), f"{_MATMUL}:matmul_plus", pitched=False),
    _gelu("cpp_matmul_gelu_erf", ("contraction", "gelu_erf")),
    _gelu("cpp_matmul_bias_gelu_erf", ("contraction", "bias", "gelu_erf")),
    _gelu("cpp_matmul_gelu_erf_grad", ("contraction", "gelu_erf_grad")),
    _gelu("cpp_matmul_gelu_tanh", ("contraction", "gelu_tanh")),
    _gelu("cpp_matmul_bias_gelu_tanh", ("contraction", "bias", "gelu_tanh")),
    _gelu("cpp_matmul_gelu_tanh_grad", ("contraction", "gelu_tanh_grad")),
    _stacked("cpp_stacked_matmul", patterns=(Siblings(("contraction",)),)),
    _stacked("cpp_stacked_matmul_bias", patterns=(Siblings(("contraction", "bias")),)),
    _attention("cpp_attention", runs=f"{_ATTENTION}:forward",
               patterns=attentions(UNDROPPED), partner="cpp_attention_grad"),
    _attention("cpp_attention_grad", runs=f"{_ATTENTION}:backward",
               consistent="autotuner.kernels.torch.attention:fill_in_statistics",
               patterns=attention_grads(UNDROPPED), partner="cpp_attention"),
)  # fmt: skip
