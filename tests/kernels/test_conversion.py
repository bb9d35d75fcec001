"""Conversions: every pair of forms in the space, every change of a mask's storage, and what there is not to convert."""

from itertools import permutations

import pytest
import torch

from autotuner.errors import KernelError
from autotuner.ir.records import Call, Candidate, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.inductor import conversion as implementation
from autotuner.kernels.rules.conversion import CAST, EXPANDED, PACKED, UNPACKED, conversion, conversion_of
from tests.kernels.calls import ODD, ROOMY, admitted, copied, faults, hidden_copies, layer, prepare

CHANGES = [
    (kernel, *pair)
    for kernel, pairs in (("pack", PACKED), ("unpack", UNPACKED), ("cast", CAST), ("expand", EXPANDED))
    for pair in pairs
]
# Torch transposes a large matrix through a tile of its own.
TILE_BYTES = 60 * 60 * 4


def call(shape: tuple[int, ...], source: str, target: str, dtype: str = "float32") -> Call:
    return Call(conversion(TensorType(shape, dtype)), Candidate("torch_copy", (source, target)))


def change(
    kernel: str, source: str, target: str, shape: tuple[int, ...], order: str, dtype: str = "float32", p: float = 0.25
) -> Call:
    """Return the conversion of a mask in one order from one storage format to another."""
    forms = tuple(order if storage == "raw" else f"{order}:{storage}" for storage in (source, target))
    return Call(conversion(TensorType(shape, dtype), p), Candidate(f"inductor_{kernel}", forms))


@pytest.mark.parametrize("extents", [ODD, ROOMY], ids=["odd", "roomy"])
@pytest.mark.slow
def test_every_conversion_of_the_space_equals_the_reference(extents: dict[str, int]) -> None:
    calls = admitted("torch_copy", extents)
    assert len(calls) > 300
    assert faults(calls) == {}


def test_bfloat16_is_copied_exactly() -> None:
    assert faults(admitted("torch_copy", ROOMY, "bfloat16", [0])[::3]) == {}


def test_every_order_of_a_tensor_is_reached_from_every_other() -> None:
    orders = ["".join(order) for order in permutations("abcd")]
    calls = [call((2, 3, 4, 5), a, b, "float64") for a in orders for b in orders if a != b]
    assert len(calls) == 24 * 23
    assert faults(calls[::5]) == {}


def test_a_conversion_allocates_nothing() -> None:
    assert hidden_copies(admitted("torch_copy", ROOMY, "float32", [0])) == {}


def test_a_large_transposition_goes_through_one_tile() -> None:
    ((_, found),) = copied([call((200, 100), "ab", "ba")])
    assert found.clones == 0
    assert sum(found.allocated) <= TILE_BYTES


def test_values_stay_where_they_belong() -> None:
    made = prepare(call((2, 3), "ab", "ba"))
    (source,), (target,) = made.inputs, made.outputs
    assert source is not None
    assert target is not None
    made.run()
    assert torch.equal(source, target)
    assert (source.stride(), target.stride()) == ((3, 1), (1, 2))


@pytest.mark.parametrize(
    "forms, reason",
    [
        (("ab", "ba"), None),
        (("a*b@0/3", "ab"), None),
        (("ab", "ab"), "ab to ab: the tensor already lies so"),
        (("ab", "*ab@1/3"), "ab to *ab@1/3: the tensor already lies so"),
        (("ab:byte", "ab"), "ab:byte to ab: a copy changes the layout, not the storage format"),
        (("ab:bit", "ba:bit"), "torch_copy reads and writes tensors by their strides, and ab:bit has none"),
    ],
)
def test_where_there_is_nothing_to_convert_it_is_said(forms: tuple[str, str], reason: str | None) -> None:
    found = call((2, 3), *forms)
    assert KERNELS["torch_copy"].refuses(found.subgraph, found.candidate) == reason


def test_an_axis_of_one_element_leaves_nothing_to_convert() -> None:
    found = call((1, 3), "ab", "ba")
    assert KERNELS["torch_copy"].refuses(found.subgraph, found.candidate) is None
    assert faults([found]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kernel, source, target", [each for each in CHANGES if each[0] != "expand"])
def test_every_change_of_a_masks_storage_equals_the_reference_in_every_order(
    kernel: str, source: str, target: str
) -> None:
    # 105 elements: whole bytes and words of bits, and some over.
    orders = ["".join(order) for order in permutations("abc")]
    calls = [change(kernel, source, target, (3, 5, 7), order) for order in orders]
    calls += [change(kernel, source, target, (5,), "a"), change(kernel, source, target, (8, 16), "ba")]
    assert faults(calls) == {}


@pytest.mark.parametrize("source, target", EXPANDED)
@pytest.mark.slow
def test_a_seed_is_expanded_as_the_reference_does_in_every_order(source: str, target: str) -> None:
    # 1,517 elements: parts of 380, the last one shorter. With 3, no part is whole.
    calls = [change("expand", source, target, (37, 41), order) for order in ("ab", "ba")]
    assert faults([*calls, change("expand", source, target, (3,), "a")]) == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.slow
def test_masks_of_other_types_change_their_storage(dtype: str) -> None:
    calls = [change(*each, (3, 5, 7), "bca", dtype) for each in CHANGES if each[0] != "expand"]
    assert faults(calls) == {}


def test_a_long_raw_mask_is_packed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    # 105 elements: 13 whole bytes, packed 4, 4, 4 and, with three of them again, the last 4.
    monkeypatch.setattr(implementation, "CHUNK", 32)
    assert faults([change("pack", "raw", "bit", (3, 5, 7), "abc")]) == {}


def test_the_first_of_eight_elements_is_the_lowest_bit() -> None:
    made = prepare(change("unpack", "bit", "byte", (2, 8), "ab"))
    (bits,), (kept,) = made.inputs, made.outputs
    assert bits is not None
    assert kept is not None
    bits.copy_(torch.tensor([0b00000001, 0b11000000]))
    made.run()
    assert kept.int().tolist() == [[1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["raw", "byte"])
@pytest.mark.parametrize("p", [0.25, 0.9])
def test_a_mask_is_the_same_after_it_was_bits(storage: str, p: float) -> None:
    # With p = 0.9 a raw mask holds 10: no bit of it alone says that it is kept.
    packs = prepare(change("pack", storage, "bit", (3, 5, 7), "cab", p=p))
    unpacks = prepare(change("unpack", "bit", storage, (3, 5, 7), "cab", p=p))
    (before,), (bits,) = packs.inputs, packs.outputs
    (same_bits,), (after,) = unpacks.inputs, unpacks.outputs
    assert before is not None
    assert bits is not None
    assert same_bits is not None
    assert after is not None
    assert bits.nbytes == 14
    packs.run()
    same_bits.copy_(bits)
    unpacks.run()
    assert torch.equal(before, after)


@pytest.mark.slow
@pytest.mark.parametrize("kernel, source, target", [each for each in CHANGES if each[0] != "expand"])
def test_a_change_of_storage_allocates_nothing_but_the_part_that_a_raw_mask_is_packed_through(
    kernel: str, source: str, target: str
) -> None:
    ((_, found),) = copied([change(kernel, source, target, (8, 16), "ab")])
    assert found.allocated == ((128,) if (source, target) == ("raw", "bit") else ())
    assert found.clones == 0


@pytest.mark.parametrize(
    "kernel, forms, reason",
    [
        ("pack", ("ab", "ba:bit"), "ab to ba:bit: the storage format changes in one memory order"),
        ("pack", ("ab:bit", "ab"), "ab:bit to ab: it leads from raw to bit, byte to bit"),
        ("expand", ("ab:bit", "ab"), "ab:bit to ab: it leads from seed to raw, seed to byte"),
        ("cast", ("ab", "ab"), "ab to ab: it leads from raw to byte, byte to raw"),
        ("cast", ("ab:bit", "ab"), "inductor_cast reads and writes tensors by their strides, and ab:bit has none"),
        ("pack", ("a*b@0/2", "ab:bit"), "a*b@0/2 to ab:bit: the storage format changes in one memory order"),
        (
            "cast",
            ("a*b@0/2", "a*b:byte@0/2"),
            "a*b@0/2 to a*b:byte@0/2: the storage format of a slice of a stack stays",
        ),
    ],
)
def test_what_a_change_of_storage_refuses_is_said(kernel: str, forms: tuple[str, str], reason: str) -> None:
    found = Candidate(f"inductor_{kernel}", forms)
    assert KERNELS[found.kernel].refuses(conversion(TensorType((2, 3), "float32"), 0.25), found) == reason


def test_without_p_the_storage_of_a_mask_does_not_change() -> None:
    found = Candidate("inductor_pack", ("ab", "ab:bit"))
    reason = KERNELS[found.kernel].refuses(conversion(TensorType((2, 3), "float32")), found)
    assert reason == "ab to ab:bit: the record does not say the p of the mask"


def test_the_p_of_a_mask_comes_from_the_operator_that_draws_it() -> None:
    graph = layer(ODD, p=0.125)
    mask, other = "attention_dropout_mask", "residual1"
    assert conversion_of(graph, mask, "bnqk", "bnqk:bit").nodes[0].attributes == (("p", 0.125),)
    assert conversion_of(graph, mask, "bnqk", "nbqk").nodes[0].attributes == ()
    with pytest.raises(
        KernelError, match=f"tensor '{other}' cannot go from blh to blh:bit: only operands of dropout_mask "
    ):
        conversion_of(graph, other, "blh", "blh:bit")
