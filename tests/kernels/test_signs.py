"""Signs: ReLU's result as one bit an element, made by conversions and fused sets, and read by ReLU's gradient."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from autotuner.ir.form import Form
from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.inductor import conversion as implementation
from autotuner.kernels.inductor.whole_bytes import by_whole_bytes
from autotuner.kernels.rules.conversion import conversion
from autotuner.kernels.rules.fused import fused_layouts
from autotuner.kernels.torch.formats import decoded, encoded
from autotuner.measure.verification import References, fault
from tests.kernels.calls import ODD, faults, layer, prepare, subgraphs

WHOLE = {"b": 2, "l": 3, "h": 8, "n": 2, "p": 4, "f": 16}
MATRIX = TensorType((3, 8), "float32")
SPECIAL = torch.tensor([0.0, -0.0, 1e-45, -1e-45, float("nan"), float("inf"), -float("inf"), 2.0])


def relu_grad(tensor: TensorType = MATRIX) -> Subgraph:
    axes = tensor.axes
    return Subgraph((Node("relu_grad", f"{axes},{axes}->{axes}", (0, 1), (2,)),), (tensor,) * 3, (0, 1), (2,))


def packs(shape: tuple[int, ...], order: str, dtype: str = "float32") -> Call:
    return Call(conversion(TensorType(shape, dtype)), Candidate("inductor_pack_signs", (order, f"{order}:sign")))


def sets(extents: dict[str, int]) -> dict[tuple[str, ...], Subgraph]:
    """Return what Inductor covers of a layer with ReLU, by kinds."""
    found = subgraphs(layer(extents, "float32", activation="relu"))
    return {subgraph.kinds: subgraph for kernel, subgraph in found if kernel == "inductor"}


def with_signs(subgraph: Subgraph) -> list[Call]:
    """Return the calls of a set that store something as signs, in declared order and with raw masks."""
    rows = (row for row in fused_layouts(subgraph) if any("abc:sign" in text for text in row))
    return [Call(subgraph, Candidate("inductor", row)) for row in rows if not any("byte" in text for text in row)]


def test_relus_gradient_of_signs_is_that_of_its_result_for_every_number() -> None:
    form, tensor = Form.parse("a:sign"), TensorType((8,), "float32")
    signs = encoded(SPECIAL, form, tensor)
    assert signs.tolist() == [0b10110100]
    grad = torch.arange(1.0, 9.0)
    read = decoded(signs, form, tensor, None)
    assert torch.equal(
        torch.ops.aten.threshold_backward(grad, read, 0), torch.ops.aten.threshold_backward(grad, SPECIAL, 0)
    )


@pytest.mark.parametrize("order", ["".join(order) for order in permutations("abc")])
def test_signs_are_in_memory_order_and_decoded_into_declared_order(order: str) -> None:
    values, form, tensor = torch.randn(3, 5, 7), Form.parse(f"{order}:sign"), TensorType((3, 5, 7), "float64")
    read = decoded(encoded(values, form, tensor), form, tensor, None)
    assert read.dtype == torch.float64
    assert torch.equal(read, (values > 0).double())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_packed_signs_equal_the_reference_in_every_order(dtype: str) -> None:
    # 105 elements: whole bytes, and one over. Five: no whole byte.
    calls = [packs((3, 5, 7), "".join(order), dtype) for order in permutations("abc")]
    assert faults([*calls, packs((5,), "a", dtype), packs((8, 16), "ba", dtype)]) == {}


@pytest.mark.slow
def test_a_long_tensor_is_packed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "CHUNK", 32)
    assert faults([packs((3, 5, 7), "abc")]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("extents", [ODD, WHOLE], ids=["rows that share bytes", "rows of whole bytes"])
@pytest.mark.parametrize("kinds", [("bias", "relu", "dropout"), ("dropout", "relu_grad", "bias_grad")])
def test_a_compiled_set_makes_and_reads_signs(extents: dict[str, int], kinds: tuple[str, ...]) -> None:
    calls = with_signs(sets(extents)[kinds])
    assert calls
    assert faults(calls) == {}


def test_sets_without_relu_have_no_rows_with_signs() -> None:
    for kinds, subgraph in sets(ODD).items():
        assert bool(with_signs(subgraph)) == bool({"relu", "relu_grad"}.intersection(kinds)), kinds


def test_a_tensor_that_is_read_for_more_than_its_sign_is_refused_as_signs() -> None:
    reason = KERNELS["inductor"].refuses(relu_grad(), Candidate("inductor", ("ab:sign", "ab", "ab")))
    assert reason == "inductor does more with tensor 0 than ab:sign tells"
    assert KERNELS["inductor"].refuses(relu_grad(), Candidate("inductor", ("ab", "ab:sign", "ab"))) is None


def test_nothing_leads_from_signs_back_to_numbers() -> None:
    for kernel in ("inductor_unpack", "inductor_pack_signs", "inductor_cast"):
        candidate = Candidate(kernel, ("ab:sign", "ab"))
        assert KERNELS[kernel].refuses(conversion(MATRIX), candidate) is not None


def test_a_set_is_seen_by_whole_bytes_where_rows_have_them() -> None:
    forms = tuple(map(Form.parse, ("ab", "ab:sign", "ab")))
    seen = by_whole_bytes(relu_grad(), forms)
    assert seen is not None
    assert seen.subgraph.tensors[0].extents == (3, 1, 8)
    assert [str(form) for form in seen.forms] == ["abc", "abc:sign", "abc"]
    assert seen.places == (1, None, 1)
    assert by_whole_bytes(relu_grad(TensorType((8, 3), "float32")), forms) is None


def test_a_wrong_sign_is_found_and_one_next_to_zero_is_not() -> None:
    call = packs((4, 8), "ab")
    made = prepare(call)
    (source,), (signs,) = made.inputs, made.outputs
    assert source is not None
    assert signs is not None
    values = made.values.inputs[0]
    values.abs_()
    values[0, 0] = -1e-9
    source.copy_(values)

    def flipped(bit: int) -> str | None:
        def run() -> None:
            signs.copy_(encoded(values, Form.parse("ab:sign"), call.subgraph.tensors[0]))
            signs[0] ^= bit

        return fault(call, KERNELS[call.candidate.kernel], run, made.values, References(), made.inputs, made.outputs)

    assert flipped(0) is None
    assert flipped(0b1) is None  # of -1e-9, which float32 does not tell from 0 beside numbers of about 1
    assert "output 0 differs from the reference in 1 of 32 elements, most at (0, 1)" in str(flipped(0b10))


def test_signs_take_a_32nd_of_float32() -> None:
    call = packs((64, 64), "ab")
    number = replace(call.candidate, forms=("ab", "ab:sign"))
    first, second = (form.stored("float32", "ab", (64, 64)) for form in number.parsed_forms())
    assert first.length * 4 == 32 * second.length
