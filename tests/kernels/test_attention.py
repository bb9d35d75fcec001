"""Attention and layer norm's backward as one kernel each."""

import pytest

from autotuner.ir.records import Candidate
from autotuner.kernels import KERNELS
from autotuner.kernels.rules.attention import BACKWARD, CAUSAL_FORWARD, FORWARD
from tests.kernels.calls import ODD, ROOMY, admitted, copied, faults

COUNTS = {
    "torch_flash_attention": 5,
    "torch_flash_attention_grad": 20,
    "torch_flash_attention_causal": 5,
    "torch_flash_attention_causal_grad": 20,
    "torch_layer_norm_grad": 3,
}
FLASH = [kernel for kernel in COUNTS if "flash" in kernel]
# Variants of the layer without dropout on the weights: one without a mask, one with a causal mask.
PLAIN, CAUSAL = 1, 3


@pytest.mark.slow
@pytest.mark.parametrize("kernel", COUNTS)
@pytest.mark.parametrize("extents", [ODD, ROOMY], ids=["odd", "roomy"])
def test_every_layout_row_equals_the_reference(kernel: str, extents: dict[str, int]) -> None:
    calls = admitted(kernel, extents)
    assert len(calls) >= COUNTS[kernel]
    assert faults(calls) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", FLASH)
def test_bfloat16_equals_the_reference_within_its_tolerance(kernel: str) -> None:
    calls = admitted(kernel, ROOMY, "bfloat16", [PLAIN, CAUSAL])
    assert calls
    assert faults(calls) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", COUNTS)
def test_operands_are_read_as_they_lie(kernel: str) -> None:
    # The library has no out-variants: it allocates its results and scratch of its own, but clones no operand.
    found = copied(admitted(kernel, ROOMY, "float32", [PLAIN, CAUSAL]))
    assert found
    assert all(allocations.allocated and not allocations.clones for _, allocations in found)


@pytest.mark.slow
def test_attention_with_dropout_or_a_mask_is_no_flash_attention() -> None:
    for variant in (0, 2, CAUSAL):
        assert admitted("torch_flash_attention", ODD, variants=[variant]) == []
        assert admitted("torch_flash_attention_grad", ODD, variants=[variant]) == []


@pytest.mark.parametrize(
    ("kernel", "variant", "kinds"),
    [("torch_flash_attention", PLAIN, FORWARD), ("torch_flash_attention_causal", CAUSAL, CAUSAL_FORWARD)],
)
def test_attention_covers_all_up_to_the_context_and_recomputes_the_weights_in_backward(
    kernel: str, variant: int, kinds: tuple[str, ...]
) -> None:
    (forward, *_), (backward, *_) = (admitted(name, ODD, variants=[variant]) for name in (kernel, f"{kernel}_grad"))
    assert forward.subgraph.kinds == kinds
    assert backward.subgraph.kinds == (*kinds[:-1], *BACKWARD)


def test_attention_that_is_not_causal_has_no_causal_kernel() -> None:
    for variant in (0, PLAIN, 2):
        assert admitted("torch_flash_attention_causal", ODD, variants=[variant]) == []
        assert admitted("torch_flash_attention_causal_grad", ODD, variants=[variant]) == []


def test_attention_reads_slices_of_stacks() -> None:
    forms = {call.candidate.forms[:3] for call in admitted("torch_flash_attention", ODD, variants=[PLAIN])}
    assert ("ab*cd@0/3", "ab*cd@1/3", "ab*cd@2/3") in forms


@pytest.mark.parametrize("kernel", FLASH)
def test_scattered_features_are_refused(kernel: str) -> None:
    call = admitted(kernel, ODD, variants=[PLAIN, CAUSAL])[0]
    forms = ("abdc", *call.candidate.forms[1:])
    assert KERNELS[kernel].refuses(call.subgraph, call.candidate) is None
    reason = KERNELS[kernel].refuses(call.subgraph, Candidate(kernel, forms))
    assert reason == "the library copies tensor 0: features are not contiguous in abdc"


@pytest.mark.parametrize("form", ["acbd", "ab*cd@0/3"])
def test_a_gradient_of_the_output_that_is_not_as_declared_is_refused(form: str) -> None:
    call = admitted("torch_flash_attention_grad", ODD, variants=[PLAIN])[0]
    moved = Candidate("torch_flash_attention_grad", (form, *call.candidate.forms[1:]))
    reason = KERNELS["torch_flash_attention_grad"].refuses(call.subgraph, moved)
    assert reason == f"the library copies its output's gradient: it lies as {form}, not as it is declared"


@pytest.mark.slow
def test_both_gradients_of_a_layer_norm_come_from_one_call() -> None:
    (call, *_) = admitted("torch_layer_norm_grad", ROOMY, "float32", [0])
    assert call.subgraph.kinds == ("layer_norm_grad_input", "layer_norm_grad_parameters")
    assert len(call.subgraph.outputs) == 3
