"""One record for candidates that execute the same: equal memory orders share a key, others do not."""

import pytest
import torch
from torch import Tensor

from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.canonical import canonical, shared_axes
from autotuner.kernels.rules.conversion import conversion
from tests.kernels.calls import ODD, admitted, faults, prepare


def one(kind: str, spec: str, *shapes: tuple[int, ...], axis: str = "") -> Subgraph:
    count = len(spec.split("->")[0].split(","))
    node = Node(kind, spec, tuple(range(count)), tuple(range(count, len(shapes))), (("axis", axis),) if axis else ())
    return Subgraph((node,), tuple(TensorType(s, "float64") for s in shapes), node.inputs, node.outputs)


def key(kernel: str, subgraph: Subgraph, *forms: str) -> str:
    return canonical(subgraph, Candidate(kernel, forms)).key


def test_names_and_declared_order_of_axes_change_nothing() -> None:
    left = one("contraction", "abc,dc->abd", (2, 3, 4), (5, 4), (2, 3, 5))
    right = one("contraction", "bac,dc->bad", (2, 3, 4), (5, 4), (2, 3, 5))
    turned = one("contraction", "abc,cd->abd", (3, 2, 4), (4, 5), (3, 2, 5))
    assert key("torch_matmul", left, "abc", "ab", "abc") == key("torch_matmul", right, "abc", "ab", "abc")
    assert key("torch_matmul", left, "abc", "ab", "abc") == key("torch_matmul", turned, "bac", "ba", "bac")


def test_axes_that_always_lie_one_behind_the_other_are_one() -> None:
    split = one("contraction", "abc,dc->abd", (2, 3, 4), (5, 4), (2, 3, 5))
    whole = one("contraction", "ab,cb->ac", (6, 4), (5, 4), (6, 5))
    assert key("torch_matmul", split, "abc", "ab", "abc") == key("torch_matmul", whole, "ab", "ab", "ab")
    merged = canonical(split, Candidate("torch_matmul", ("abc", "ab", "abc")))
    assert merged.subgraph.nodes[0].spec == "ab,cb->ac"
    assert [tensor.extents for tensor in merged.subgraph.tensors] == [(6, 4), (5, 4), (6, 5)]


def test_attributes_that_are_equal_numbers_of_two_types_stay_as_they_are() -> None:
    found = []
    for factor in (2, 2.0):
        node = Node("scale", "ab->ab", (0,), (1,), (("factor", factor),))
        scale = Subgraph((node,), (TensorType((2, 3), "float64"),) * 2, (0,), (1,))
        found.append(canonical(scale, Candidate("torch_scale", ("ab", "ab"))))
    assert [repr(call.subgraph.nodes[0].attributes[0][1]) for call in found] == ["2", "2.0"]
    assert found[0].key != found[1].key


def test_element_wise_work_on_whole_tensors_is_one_call_whatever_the_order() -> None:
    add = one("add", "abc,abc->abc", (2, 3, 4), (2, 3, 4), (2, 3, 4))
    flat = one("add", "a,a->a", (24,), (24,), (24,))
    assert {key("torch_add", add, *[order] * 3) for order in ("abc", "bca", "cab")} == {
        key("torch_add", flat, "a", "a", "a")
    }


def test_a_tensor_that_meets_itself_keeps_its_axes_apart() -> None:
    node = Node("contraction", "abc,adc->abd", (0, 0), (1,))
    pairs = Subgraph((node,), (TensorType((2, 3, 4), "float64"), TensorType((2, 3, 3), "float64")), (0,), (1,))
    for forms in (("abc", "abc"), ("abc", "acb"), ("acb", "abc")):
        call = canonical(pairs, Candidate("torch_matmul", forms))
        assert call.subgraph == pairs
        assert faults([call]) == {}


@pytest.mark.parametrize(
    "forms",
    [
        ("abc", "ba", "abc"),
        ("cab", "ab", "abc"),
        ("abc", "ab", "cab"),
        ("a*bc@0/2", "ab", "abc"),
        ("abc", "ab", "ab*c@0/2"),
        ("abc", "ab", "ab*c@1/2"),
    ],
)
def test_another_memory_order_is_another_call(forms: tuple[str, ...]) -> None:
    subgraph = one("contraction", "abc,dc->abd", (2, 3, 4), (5, 4), (2, 3, 5))
    assert key("torch_matmul", subgraph, *forms) != key("torch_matmul", subgraph, "abc", "ab", "abc")


def test_extents_dtypes_kernels_and_parameters_tell_calls_apart() -> None:
    base = one("scale", "ab->ab", (2, 3), (2, 3))
    wide = one("scale", "ab->ab", (2, 4), (2, 4))
    single = Subgraph(base.nodes, (TensorType((2, 3), "float32"),) * 2, (0,), (1,))
    keys = {key("torch_scale", subgraph, "ab", "ab") for subgraph in (base, wide, single)}
    keys.add(key("torch_copy", base, "ab", "ab"))
    keys.add(canonical(base, Candidate("torch_scale", ("ab", "ab"), (("block", 8),))).key)
    assert len(keys) == 5


def test_storage_formats_tell_calls_apart() -> None:
    drop = one("dropout", "ab,ab->ab", (2, 3), (2, 3), (2, 3))
    assert key("torch_dropout", drop, "ab", "ab", "ab") != key("torch_dropout", drop, "ab", "ab:byte", "ab")
    assert key("torch_dropout", drop, "ab", "ab:byte", "ab") == key("torch_dropout", drop, "ba", "ba:byte", "ba")


def test_an_axis_that_an_operator_names_stays_by_itself() -> None:
    softmax = one("softmax", "abc->abc", (2, 3, 4), (2, 3, 4), axis="c")
    call = canonical(softmax, Candidate("torch_softmax", ("abc", "abc")))
    assert [tensor.extents for tensor in call.subgraph.tensors] == [(6, 4), (6, 4)]
    assert call.subgraph.nodes[0].attributes == (("axis", "b"),)
    assert key("torch_softmax", softmax, "abc", "abc") != key("torch_softmax", softmax, "cab", "cab")


def test_the_axes_that_a_causal_mask_names_stay_apart_and_keep_their_parts() -> None:
    node = Node("causal_mask", "abcd->abcd", (0,), (1,), (("key_axis", "d"), ("query_axis", "c")))
    causal = Subgraph((node,), (TensorType((2, 3, 4, 4), "float64"),) * 2, (0,), (1,))
    call = canonical(causal, Candidate("torch_causal_mask", ("abcd", "abcd")))
    assert [tensor.extents for tensor in call.subgraph.tensors] == [(6, 4, 4), (6, 4, 4)]
    assert call.subgraph.nodes[0].attributes == (("key_axis", "c"), ("query_axis", "b"))
    turned = canonical(causal, Candidate("torch_causal_mask", ("abdc", "abdc")))
    assert turned.subgraph.nodes[0].attributes == (("key_axis", "b"), ("query_axis", "c"))
    assert turned.key != call.key


def test_the_inside_of_a_fused_call_follows_its_output() -> None:
    tensors = tuple(TensorType(s, "float64") for s in ((2, 3, 4), (5, 4), (5,), (2, 3, 5), (2, 3, 5)))
    nodes = (Node("contraction", "abc,dc->abd", (0, 1), (4,)), Node("bias", "abc,c->abc", (4, 2), (3,)))
    call = canonical(
        Subgraph(nodes, tensors, (0, 1, 2), (3,)), Candidate("torch_matmul_bias", ("abc", "ab", "a", "cab"))
    )
    assert call.subgraph.tensors[3].extents == call.subgraph.tensors[4].extents == (5, 6)
    assert [node.spec for node in call.subgraph.nodes] == ["ab,cb->ca", "ab,a->ab"]


def test_what_depends_on_more_than_memory_order_is_left_as_it_is() -> None:
    scores = one("contraction", "abcd,aecd->acbe", (2, 3, 5, 4), (2, 3, 5, 4), (2, 5, 3, 3))
    candidate = Candidate("torch_matmul_loop", ("acbd", "acbd", "abcd"))
    assert canonical(scores, candidate) == Call(scores, candidate)


def test_axes_are_one_where_specs_bind_them_to_one_letter() -> None:
    tensors = tuple(TensorType(s, "float64") for s in ((2, 3), (3,), (2, 3), (2, 3)))
    nodes = (Node("bias", "ab,b->ab", (0, 1), (3,)), Node("scale", "xy->xy", (3,), (2,)))
    axes = shared_axes(Subgraph(nodes, tensors, (0, 1), (2,)))
    assert axes[0] == axes[2] == axes[3]
    assert axes[1] == axes[0][1:]


@pytest.mark.slow
def test_canonical_calls_are_their_own_canonical_calls() -> None:
    for kernel in ("torch_matmul", "torch_bias", "torch_softmax"):
        for call in admitted(kernel, ODD, variants=[0])[:60]:
            once = canonical(call.subgraph, call.candidate)
            assert canonical(once.subgraph, once.candidate) == once


@pytest.mark.parametrize(
    "kernel",
    ["torch_matmul", "torch_matmul_bias", "torch_matmul_add", "torch_matmul_scale", "torch_bias", "torch_bias_grad",
     "torch_softmax", "torch_softmax_grad", "torch_layer_norm", "torch_layer_norm_grad", "torch_dropout", "torch_add",
     "torch_copy", "torch_causal_mask"],
)  # fmt: skip
def test_a_canonical_call_writes_the_same_memory_as_the_original(kernel: str) -> None:
    assert KERNELS[kernel].merges
    for call in admitted(kernel, ODD, variants=[3] if kernel == "torch_causal_mask" else [0])[::3]:
        twin = canonical(call.subgraph, call.candidate)
        mine, theirs = prepare(call), prepare(twin)
        for source, target in zip(mine.inputs, theirs.inputs, strict=True):
            memory(target).copy_(memory(source))
        mine.run()
        theirs.run()
        for left, right in zip(mine.outputs, theirs.outputs, strict=True):
            assert torch.equal(memory(left), memory(right)), (call.subgraph.nodes, call.candidate.forms)


def memory(tensor: Tensor | None) -> Tensor:
    """View the whole buffer of an operand as it lies."""
    assert tensor is not None
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


@pytest.mark.parametrize("source, target", [("raw", "bit"), ("seed", "raw")])
def test_what_a_flat_mask_means_depends_on_memory_order_alone_so_all_orders_are_one_call(
    source: str, target: str
) -> None:
    kernel = "inductor_pack" if target == "bit" else "inductor_expand"

    def call(order: str, extents: tuple[int, ...]) -> Call:
        forms = tuple(order if storage == "raw" else f"{order}:{storage}" for storage in (source, target))
        return canonical(conversion(TensorType(extents, "float32"), 0.25), Candidate(kernel, forms))

    calls = {call("abc", (3, 5, 7)), call("cab", (3, 5, 7)), call("a", (105,))}
    assert {(c.subgraph.tensors[0].extents, c.candidate.forms[0][:1]) for c in calls} == {((105,), "a")}
    assert len({c.key for c in calls}) == 1
