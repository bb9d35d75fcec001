"""Own CPU kernels in C++: products with what follows them, and attention, of float32 operands."""

from autotuner.ir.records import Candidate, Subgraph
from autotuner.kernels.geometry import forms_by_number
from autotuner.kernels.patterns import Attention, Siblings
from autotuner.kernels.registry import KERNELS, Kernel, Refuses
from autotuner.kernels.rules.attention import (
    CAUSAL_FORWARD,
    FORWARD,
    attention_grads,
    attention_layouts,
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


for _name, _kinds, _function in (
    ("cpp_matmul", ("contraction",), "matmul"),
    ("cpp_matmul_bias", ("contraction", "bias"), "matmul_plus"),
    ("cpp_matmul_add", ("contraction", "add"), "matmul_plus"),
):
    KERNELS.add(
        Kernel(
            _name, _kinds, f"{_MATMUL}:{_function}", _of_float32(not_one_product), layouts=product_layouts,
            anchors=True, pitched=_name != "cpp_matmul_add",
        )
    )  # fmt: skip
for _gelu in ("gelu_erf", "gelu_tanh"):
    for _chain in (("contraction", _gelu), ("contraction", "bias", _gelu), ("contraction", f"{_gelu}_grad")):
        KERNELS.add(
            Kernel(
                "_".join(("cpp_matmul", *_chain[1:])), _chain, f"{_MATMUL}:matmul_gelu",
                _of_float32(not_under_gelu), layouts=gelu_layouts, anchors=True,
            )
        )  # fmt: skip
for _name, _siblings in (
    ("cpp_stacked_matmul", Siblings(("contraction",))),
    ("cpp_stacked_matmul_bias", Siblings(("contraction", "bias"))),
):
    KERNELS.add(
        Kernel(
            _name, (), f"{_MATMUL}:stacked_matmul", _of_float32(not_one_stacked_product),
            layouts=stacked_product_layouts, anchors=True, merges=False, patterns=(_siblings,),
        )
    )  # fmt: skip
KERNELS.add(
    Kernel(
        "cpp_attention", (), f"{_ATTENTION}:forward", _of_float32(features_scattered), layouts=attention_layouts,
        anchors=True, merges=False, pitched=True, patterns=tuple(Attention(kinds) for kinds in UNDROPPED),
        partner="cpp_attention_grad",
    )
)  # fmt: skip
KERNELS.add(
    Kernel(
        "cpp_attention_grad", (), f"{_ATTENTION}:backward", _of_float32(features_scattered),
        consistent="autotuner.kernels.torch.attention:fill_in_statistics", layouts=attention_layouts, anchors=True,
        merges=False, pitched=True, patterns=attention_grads(UNDROPPED), partner="cpp_attention",
    )
)  # fmt: skip
