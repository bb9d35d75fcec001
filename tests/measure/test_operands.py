"""Where made-up operands lie and what they hold."""

import pytest
import torch

from autotuner.errors import KernelError
from autotuner.ir.form import Form
from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels.rules.conversion import conversion
from autotuner.measure.operands import Buffers, Values, boundary_bytes, stacks

T = TensorType((2, 3), "float32")


def three_in(*forms: str) -> Call:
    subgraph = Subgraph((Node("add", "ab,ab,ab->ab", (0, 1, 2), (3,)),), (T,) * 4, (0, 1, 2), (3,))
    return Call(subgraph, Candidate("any", (*forms, "ab")))


def grouped(*forms: str) -> list[list[int]]:
    boundary = [(place, Form.parse(text)) for place, text in enumerate(forms)]
    return stacks(boundary, (T,) * len(forms))


def test_slices_of_one_stack_lie_in_one_buffer() -> None:
    call = three_in("a*b@0/3", "a*b@1/3", "a*b@2/3")
    values = Values(call.subgraph)
    q, k, v = (t for t in Buffers().inputs(call, values, 0) if t is not None)
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert [t.storage_offset() for t in (q, k, v)] == [0, 3, 6]
    assert {t.stride() for t in (q, k, v)} == {(9, 1)}
    assert torch.equal(v, values.inputs[2])


def test_a_lone_slice_lies_in_a_buffer_of_its_whole_stack() -> None:
    call = three_in("a*b@1/3", "ab", "ba")
    first, second, third = (t for t in Buffers().inputs(call, Values(call.subgraph), 0) if t is not None)
    assert (first.storage_offset(), first.untyped_storage().nbytes()) == (3, 3 * 6 * 4)
    assert second.stride() == (3, 1)
    assert third.stride() == (1, 2)


def test_stacks_are_told_apart_by_layout_count_and_index() -> None:
    assert grouped("*ab@0/2", "*ab@1/2", "a*b@0/2", "ab") == [[0, 1], [2], [3]]
    assert grouped("*ab@0/2", "*ab@1/2", "*ab@0/2", "*ab@1/2") == [[0, 1], [2, 3]]
    assert grouped("*ab@0/2", "*ab@0/2", "*ab@1/2", "*ab@1/2") == [[0, 2], [1, 3]]
    assert grouped("*ab@0/2", "*ab@1/3") == [[0], [1]]


def test_candidates_share_the_tensors_whose_forms_agree() -> None:
    one, other = three_in("ab", "ab", "ab"), three_in("ab", "ba", "ab")
    values, buffers = Values(one.subgraph), Buffers()
    mine, theirs = buffers.inputs(one, values, 0), buffers.inputs(other, values, 0)
    assert mine[0] is theirs[0]
    assert mine[1] is not theirs[1]
    assert buffers.inputs(one, values, 1)[0] is not mine[0]
    assert buffers.held_bytes == 7 * 24


def test_an_absent_tensor_is_none_and_costs_nothing() -> None:
    call = three_in("ab", "absent", "ab")
    inputs = Buffers().inputs(call, Values(call.subgraph), 0)
    assert [tensor is None for tensor in inputs] == [False, True, False]
    assert boundary_bytes(call) == 3 * 24


def test_values_depend_on_the_subgraph_alone() -> None:
    subgraph = three_in("ab", "ab", "ab").subgraph
    assert torch.equal(Values(subgraph).inputs[1], Values(subgraph).inputs[1])
    assert not torch.equal(Values(subgraph).inputs[0], Values(subgraph).inputs[1])


def test_a_dropout_mask_is_stored_as_bytes_as_bits_or_with_its_scale() -> None:
    tensor = TensorType((100, 99), "float32")
    node = Node("dropout", "ab,ab->ab", (0, 1), (2,), (("p", 0.25),))
    values = Values(Subgraph((node,), (tensor,) * 3, (0, 1), (2,)))
    byte, raw, bits = (values.stored(1, Form.parse(text)) for text in ("ab:byte", "ab", "ba:bit"))
    assert byte.dtype == torch.bool
    assert 0.70 < float(byte.float().mean()) < 0.80
    assert set(raw.flatten().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
    assert torch.equal(raw != 0, byte)
    assert (bits.dtype, bits.shape) == (torch.uint8, (1238,))
    assert torch.equal(values.meant(1, Form.parse("ba:bit")), byte)


def test_a_seed_means_another_mask_in_each_order() -> None:
    tensor = TensorType((30, 30), "float32")
    values = Values(conversion(tensor, 0.25))
    one, other = Form.parse("ab:seed"), Form.parse("ba:seed")
    assert torch.equal(values.stored(0, one), values.stored(0, other))
    assert values.stored(0, one).dtype == torch.int64
    assert torch.equal(values.meant(0, one), values.meant(0, other).t())
    assert 0.65 < float(values.meant(0, one).float().mean()) < 0.85


def test_bits_and_seeds_take_the_bytes_that_they_have() -> None:
    call = Call(conversion(TensorType((3, 5), "float32"), 0.25), Candidate("any", ("ab:bit", "ab:seed")))
    values, buffers = Values(call.subgraph), Buffers()
    (bits,), (seed,) = buffers.inputs(call, values, 0), buffers.outputs(call, values, 0)
    assert bits is not None
    assert seed is not None
    assert (bits.dtype, bits.shape, seed.dtype, seed.shape) == (torch.uint8, (2,), torch.int64, (1,))
    assert boundary_bytes(call) == buffers.held_bytes == 10


def test_the_reciprocal_deviation_is_positive() -> None:
    wide, rows, narrow = TensorType((50, 4), "float32"), TensorType((50,), "float32"), TensorType((4,), "float32")
    node = Node("layer_norm_grad_input", "ab,ab,b,a,a->ab", (0, 1, 2, 3, 4), (5,))
    values = Values(Subgraph((node,), (wide, wide, narrow, rows, rows, wide), (0, 1, 2, 3, 4), (5,)))
    assert float(values.inputs[4].min()) >= 0.5
    assert float(values.inputs[3].min()) < 0


def test_integers_cannot_be_made_up() -> None:
    whole = TensorType((2, 3), "int64")
    subgraph = Subgraph((Node("add", "ab,ab->ab", (0, 1), (2,)),), (whole,) * 3, (0, 1), (2,))
    with pytest.raises(KernelError, match="int64"):
        Values(subgraph)
