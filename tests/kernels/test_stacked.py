"""Siblings computed as one: every layout row against the reference, and slices that do not make one stack refused."""

from collections import Counter

import pytest

from autotuner.ir.records import Candidate, Node, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.rules.stacked import stacked_node
from autotuner.kernels.torch.stacked import whole
from tests.kernels.calls import ODD, ROOMY, admitted, copied, faults, hidden_copies, prepare

COUNTS = {
    "torch_stacked_matmul": 96,
    "torch_stacked_matmul_bias": 32,
    "torch_stacked_bias": 2,
    "torch_stacked_bias_grad": 2,
}
X, W, Y, B = (TensorType(shape, "float32") for shape in ((2, 3, 4), (5, 6, 4), (2, 3, 5, 6), (5, 6)))
PAIR = Subgraph(
    (Node("contraction", "abc,dec->abde", (0, 1), (3,)), Node("contraction", "abc,dec->abde", (0, 2), (4,))),
    (X, W, W, Y, Y), (0, 1, 2), (3, 4),
)  # fmt: skip


def refusal(*forms: str) -> str | None:
    kernel = "torch_stacked_matmul"
    return KERNELS[kernel].refuses(PAIR, Candidate(kernel, forms))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", COUNTS)
@pytest.mark.parametrize("extents", [ODD, ROOMY], ids=["odd", "roomy"])
def test_every_layout_row_equals_the_reference(kernel: str, extents: dict[str, int]) -> None:
    calls = admitted(kernel, extents)
    assert len(calls) >= COUNTS[kernel]
    assert faults(calls) == {}


@pytest.mark.parametrize("kernel", COUNTS)
@pytest.mark.slow
def test_bfloat16_equals_the_reference_within_its_tolerance(kernel: str) -> None:
    assert faults(admitted(kernel, ROOMY, "bfloat16", [0])[::3]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", COUNTS)
def test_no_operand_is_copied(kernel: str) -> None:
    assert hidden_copies(admitted(kernel, ROOMY, "float32", [0])) == {}
    assert [found.clones for _, found in copied(admitted(kernel, ROOMY, "bfloat16", [0])) if found.clones] == []


def test_triples_and_pairs_are_stacked_forward_and_backward() -> None:
    found = Counter(
        (call.subgraph.kinds.count("contraction"), call.subgraph.kinds.count("add"))
        for call in admitted("torch_stacked_matmul", ROOMY, variants=[0])
    )
    # products and weight gradients; what flows into the input is summed along the stack (and onto the residual's part)
    assert found == {(3, 0): 32, (3, 3): 16, (2, 0): 32, (2, 2): 16}


def test_slices_of_one_stack_share_a_buffer() -> None:
    call = next(
        c for c in admitted("torch_stacked_matmul", ODD, variants=[0]) if c.subgraph.kinds == ("contraction",) * 3
    )
    made = prepare(call)
    slices = [tensor for tensor in made.outputs if tensor is not None]
    assert whole(slices).shape == (3, *slices[0].shape)
    with pytest.raises(ValueError, match="stacked operands lie at offsets"):
        whole(slices[::-1])


def test_the_stacking_axis_is_a_letter_of_one_node() -> None:
    assert stacked_node(PAIR) == Node("contraction", "abc,zdec->zabde", (0, 1), (2,))


@pytest.mark.parametrize(
    "forms, reason",
    [
        (("abc", "*abc@0/2", "*abc@1/2", "ab*cd@0/2", "ab*cd@1/2"), None),
        (("abc", "c*ab@0/2", "c*ab@1/2", "*cdab@0/2", "*cdab@1/2"), None),
        (("abc", "*abc@1/2", "*abc@0/2", "ab*cd@0/2", "ab*cd@1/2"),
         "the stacked operand's slices lie as ['*abc@1/2', '*abc@0/2'], not in order in one buffer"),
        (("abc", "abc", "abc", "ab*cd@0/2", "ab*cd@1/2"),
         "the stacked operand's slices lie as ['abc', 'abc'], not in order in one buffer"),
        (("abc", "*abc@0/2", "*cab@1/2", "ab*cd@0/2", "ab*cd@1/2"),
         "the slices of a stacked operand lie in different layouts"),
        (("abc", "*abc@0/2", "*abc@1/2", "a*bcd@0/2", "a*bcd@1/2"),
         "the row axes 'ab' do not act as one axis in every operand"),
    ],
)  # fmt: skip
def test_what_is_not_one_product_is_refused_in_a_sentence(forms: tuple[str, ...], reason: str | None) -> None:
    assert refusal(*forms) == reason
