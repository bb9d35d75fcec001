"""Element-wise kernels, dropout, normalisations and reductions: every layout row, no copies, and what they refuse."""

from math import prod

import pytest
import torch

from autotuner.ir.form import Form
from autotuner.ir.records import Call, Candidate, Node, Scalar, Subgraph, TensorType
from autotuner.kernels import KERNELS
from tests.kernels.calls import ODD, ROOMY, admitted, copied, faults, hidden_copies, prepare

# At least as many calls over three variants of the layer: each row of the rule, and what the search space adds to them.
COUNTS = {
    "torch_scale": 25,
    "torch_add": 7,
    "torch_bias": 73,
    "torch_mask": 32,
    "torch_causal_mask": 29,
    "torch_gelu_erf": 7,
    "torch_gelu_erf_grad": 7,
    "torch_gelu_tanh": 7,
    "torch_gelu_tanh_grad": 7,
    "torch_relu": 7,
    "torch_relu_grad": 7,
    "torch_dropout": 78,
    "torch_bernoulli": 78,
    "torch_random_bits": 78,
    "torch_bias_grad": 53,
    "torch_bias_grad_ones": 21,
    "torch_softmax": 33,
    "torch_softmax_grad": 33,
    "torch_layer_norm": 3,
    "torch_layer_norm_grad_input": 3,
    "torch_layer_norm_grad_parameters": 3,
}
# The library's layer norm has no out-variant: it allocates its results, and the kernel copies them into its outputs.
ALLOCATING = ("torch_layer_norm", "torch_layer_norm_grad_input", "torch_layer_norm_grad_parameters")
# Random words are scratch of every call: kept from call to call, they would be as much memory as the mask, for good.
DRAWING = ("torch_random_bits",)
STEADY = [kernel for kernel in COUNTS if kernel not in ALLOCATING]


def refusal(kernel: str, subgraph: Subgraph, *forms: str) -> str | None:
    return KERNELS[kernel].refuses(subgraph, Candidate(kernel, forms))


def subgraph(kind: str, spec: str, *shapes: tuple[int, ...], dtype: str = "float32", **attributes: Scalar) -> Subgraph:
    count = len(spec.split("->")[0].split(",")) if spec.split("->")[0] else 0
    places = tuple(range(len(shapes)))
    node = Node(kind, spec, places[:count], places[count:], tuple(attributes.items()))
    return Subgraph((node,), tuple(TensorType(shape, dtype) for shape in shapes), places[:count], places[count:])


@pytest.mark.parametrize("kernel", COUNTS)
@pytest.mark.slow
def test_every_layout_row_equals_the_reference(kernel: str) -> None:
    calls = admitted(kernel, ROOMY)
    assert len(calls) >= COUNTS[kernel]
    assert faults(calls) == {}


@pytest.mark.parametrize("kernel", COUNTS)
@pytest.mark.slow
def test_every_layout_row_of_a_small_layer_equals_the_reference(kernel: str) -> None:
    calls = admitted(kernel, ODD)
    assert calls
    assert faults(calls) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [kernel for kernel in STEADY if kernel not in DRAWING])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_operand_is_copied_or_cast(kernel: str, dtype: str) -> None:
    calls = admitted(kernel, ROOMY, dtype)
    assert calls
    assert hidden_copies(calls) == {}


@pytest.mark.parametrize("kernel", STEADY)
@pytest.mark.slow
def test_bfloat16_equals_the_reference_within_its_tolerance(kernel: str) -> None:
    calls = admitted(kernel, ROOMY, "bfloat16", [0])[::3] or admitted(kernel, ROOMY, "bfloat16")
    assert calls
    assert faults(calls) == {}


@pytest.mark.parametrize("kernel", ALLOCATING)
@pytest.mark.slow
def test_a_layer_norm_allocates_its_results_and_rows_of_scratch_only(kernel: str) -> None:
    calls = admitted(kernel, ROOMY, "float32")
    for call, found in copied(calls):
        assert found.clones == 0
        beside = list(found.allocated)
        for number in call.subgraph.outputs:
            beside.remove(4 * prod(call.subgraph.tensors[number].extents))
        # Each thread sums the gradients of scale and bias in a row of its own.
        assert all(size <= torch.get_num_threads() * 2 * 4 * ROOMY["h"] for size in beside)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ALLOCATING)
def test_a_layer_norm_of_16_bits_is_refused(kernel: str) -> None:
    assert admitted(kernel, ODD, "bfloat16", [0]) == []
    wide, rows, narrow = (4, 8), (4,), (8,)
    norm = subgraph("layer_norm", "ab,b,b->ab,a,a", wide, narrow, narrow, wide, rows, rows, dtype="bfloat16")
    assert refusal("torch_layer_norm", norm, "ab", "a", "a", "ab", "a", "a") == (
        "torch keeps the statistics of a bfloat16 layer norm in bfloat16; the graph keeps them in float32"
    )


def test_a_layer_norm_over_a_scattered_axis_is_refused() -> None:
    wide, rows, narrow = (4, 8), (4,), (8,)
    norm = subgraph("layer_norm", "ab,b,b->ab,a,a", wide, narrow, narrow, wide, rows, rows)
    assert refusal("torch_layer_norm", norm, "ab", "a", "a", "ab", "a", "a") is None
    assert refusal("torch_layer_norm", norm, "ba", "a", "a", "ba", "a", "a") == (
        "the library's layer_norm copies unless axis 'b' is contiguous"
    )


def test_a_layer_norm_over_two_axes_has_both_innermost_and_in_order() -> None:
    wide, rows, narrow = (2, 4, 8), (2,), (4, 8)
    norm = subgraph("layer_norm", "abc,bc,bc->abc,a,a", wide, narrow, narrow, wide, rows, rows)
    assert refusal("torch_layer_norm", norm, "abc", "ab", "ab", "abc", "a", "a") is None
    for order in ("acb", "bac"):
        assert refusal("torch_layer_norm", norm, order, "ab", "ab", order, "a", "a") is not None


@pytest.mark.parametrize(
    "forms, reason",
    [
        (("abc", "abc", "abc"), None),
        (("cab", "cab", "cab"), None),
        (("a*bc@0/2", "abc", "*abc@1/2"), None),
        (("abc", "abc", "acb"), "add wants one layout; tensor 2 lies as acb, not in the order 'abc'"),
        (("acb", "abc", "abc"), "add wants one layout; tensor 1 lies as abc, not in the order 'acb'"),
        (("abc", "absent", "abc"), "add reads and writes every operand"),
    ],
)
def test_operands_in_different_orders_are_refused(forms: tuple[str, ...], reason: str | None) -> None:
    assert refusal("torch_add", subgraph("add", "abc,abc->abc", *[(2, 3, 4)] * 3), *forms) == reason


def test_an_axis_of_one_element_has_no_order() -> None:
    assert refusal("torch_add", subgraph("add", "abc,abc->abc", *[(2, 1, 4)] * 3), "abc", "bac", "acb") is None


@pytest.mark.parametrize("axis", ["a", "b", "c"])
def test_softmax_runs_along_any_axis(axis: str) -> None:
    node = Node("softmax", "abc->abc", (0,), (1,), (("axis", axis),))
    along = Subgraph((node,), (TensorType((3, 5, 7), "float64"),) * 2, (0,), (1,))
    calls = [Call(along, Candidate("torch_softmax", row)) for row in KERNELS["torch_softmax"].layouts(along)]
    assert len(calls) == 6
    assert faults(calls) == {}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_softmax_with_sinks_and_their_gradient_equal_the_reference_in_every_order(dtype: str) -> None:
    sums = TensorType((2, 3, 5), "float64" if dtype == "float64" else "float32")
    scores, sinks, along = TensorType((2, 3, 5, 7), dtype), TensorType((3,), dtype), (("axis", "d"),)
    forward = Node("sink_softmax", "abcd,b->abcd,abc", (0, 1), (2, 3), along)
    backward = Node("sink_grad", "abcd,abcd,abc,b->b", (0, 1, 2, 3), (4,), along)
    for kernel, subgraph in {
        "torch_sink_softmax": Subgraph((forward,), (scores, sinks, scores, sums), (0, 1), (2, 3)),
        "torch_sink_grad": Subgraph((backward,), (scores, scores, sums, sinks, sinks), (0, 1, 2, 3), (4,)),
    }.items():
        calls = [Call(subgraph, Candidate(kernel, row)) for row in KERNELS[kernel].layouts(subgraph)]
        assert len(calls) == 24
        assert faults(calls) == {}


def test_a_narrow_operand_follows_the_order_of_the_widest() -> None:
    grad = subgraph("softmax_grad", "abc,abc,ab->abc", (2, 3, 4), (2, 3, 4), (2, 3), (2, 3, 4))
    rows = list(KERNELS["torch_softmax_grad"].layouts(grad))
    assert ("bca", "bca", "ba", "bca") in rows
    assert len(rows) == 6


def test_a_mask_comes_raw_or_as_bytes_in_every_order() -> None:
    drop = subgraph("dropout", "ab,ab->ab", (2, 3), (2, 3), (2, 3), p=0.5)
    assert list(KERNELS["torch_dropout"].layouts(drop)) == [
        ("ab", "ab", "ab"), ("ab", "ab:byte", "ab"), ("ba", "ba", "ba"), ("ba", "ba:byte", "ba"),
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["ab", "ab:byte"])
def test_dropout_zeroes_what_the_mask_drops_and_scales_the_rest(form: str) -> None:
    drop = subgraph("dropout", "ab,ab->ab", (2, 2), (2, 2), (2, 2), p=0.75)
    made = prepare(Call(drop, Candidate("torch_dropout", ("ab", form, "ab"))))
    x, mask = (t for t in made.inputs if t is not None)
    x.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    mask.copy_(torch.tensor([[1, 0], [0, 1]]) * (1 if form == "ab:byte" else 4))
    made.run()
    assert made.outputs[0] is not None
    assert made.outputs[0].tolist() == [[4.0, 0.0], [0.0, 16.0]]


@pytest.mark.parametrize("form", ["abc", "acb", "bca", "cba"])
def test_a_causal_mask_hides_what_comes_after_whatever_the_order(form: str) -> None:
    causal = subgraph("causal_mask", "abc->abc", (2, 3, 3), (2, 3, 3), query_axis="b", key_axis="c")
    made = prepare(Call(causal, Candidate("torch_causal_mask", (form, form))))
    x, (y,) = made.inputs[0], made.outputs
    assert x is not None
    assert y is not None
    x.fill_(2.0)
    for _ in range(2):
        made.run()
    inf = float("inf")
    assert y.tolist() == [[[2.0, -inf, -inf], [2.0, 2.0, -inf], [2.0, 2.0, 2.0]]] * 2


@pytest.mark.parametrize("kernel", ["torch_bernoulli", "torch_random_bits"])
@pytest.mark.parametrize("form", ["ab", "ba:byte"])
def test_drawn_masks_repeat_with_the_seed_and_change_without_it(kernel: str, form: str) -> None:
    draw = subgraph("dropout_mask", "->ab", (30, 40), p=0.1)
    made = prepare(Call(draw, Candidate(kernel, (form,))))
    (mask,) = (t for t in made.outputs if t is not None)
    drawn = []
    for seed in (1, 2, 1):
        torch.default_generator.manual_seed(seed)
        made.run()
        drawn.append(mask.clone())
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sum_of_16_bits_over_scattered_axes_is_refused(dtype: str) -> None:
    grad = subgraph("bias_grad", "abc->c", (2, 3, 4), (4,), dtype=dtype)
    assert refusal("torch_bias_grad", grad, "abc", "a") is None
    assert refusal("torch_bias_grad", grad, "cab", "a") is None
    assert refusal("torch_bias_grad", grad, "acb", "a") == (
        f"torch casts a whole {dtype} operand to float32 unless the summed axes act as one"
    )


@pytest.mark.parametrize("forms", [("abc", "abc"), ("cab", "abc"), ("abc", "bca")])
def test_a_bias_gradient_that_sums_nothing_is_a_copy(forms: tuple[str, str]) -> None:
    grad = subgraph("bias_grad", "abc->cab", (2, 3, 4), (4, 2, 3))
    assert refusal("torch_bias_grad", grad, *forms) is None
    assert faults([Call(grad, Candidate("torch_bias_grad", forms))]) == {}


def test_a_bias_gradient_that_is_no_matrix_is_refused_as_a_product_with_ones() -> None:
    grad = subgraph("bias_grad", "abc->c", (2, 3, 4), (4,))
    assert refusal("torch_bias_grad_ones", grad, "abc", "a") is None
    assert refusal("torch_bias_grad_ones", grad, "acb", "a") == "the summed or the kept axes do not act as one axis"
    assert refusal("torch_bias_grad_ones", grad, "abc*@0/2", "a") == (
        "neither the summed nor the kept axes are contiguous"
    )


@pytest.mark.slow
def test_slices_of_stacks_are_in_the_space() -> None:
    pitched = {
        kernel for kernel in COUNTS for call in admitted(kernel, ROOMY)
        if any(Form.parse(text).stack for text in call.candidate.forms)
    }  # fmt: skip
    assert pitched == {"torch_bias", "torch_bias_grad", "torch_bias_grad_ones"}


GATED = {"silu": "abc->abc", "silu_grad": "abc,abc->abc", "multiply": "abc,abc->abc"}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", GATED)
def test_what_a_gated_feed_forward_needs_equals_the_reference_and_allocates_nothing(kind: str, dtype: str) -> None:
    kernel = KERNELS[f"torch_{kind}"]
    one = subgraph(kind, GATED[kind], *[(3, 4, 5)] * (GATED[kind].count("abc")), dtype=dtype)
    found = [Call(one, Candidate(kernel.name, row)) for row in kernel.layouts(one)]
    found.append(Call(one, Candidate(kernel.name, ("a*bc@0/2",) * len(one.inputs) + ("abc",))))
    assert len(found) == 7
    assert all(kernel.refuses(one, call.candidate) is None for call in found)
    assert faults(found) == {}
    assert hidden_copies(found) == {}


def test_a_row_mask_is_a_factor_of_rows_wherever_they_lie() -> None:
    one = subgraph("row_mask", "abcd,ac->abcd", (2, 3, 4, 5), (2, 4), (2, 3, 4, 5))
    found = [Call(one, Candidate("torch_row_mask", row)) for row in KERNELS["torch_row_mask"].layouts(one)]
    assert len(found) == 24
    assert faults(found) == {}
