"""Conversions: every pair of forms in the space, and what there is nothing to convert between."""

from itertools import permutations

import pytest
import torch

from autotuner.kernels import KERNELS
from autotuner.kernels.conversion import conversion
from autotuner.records import Call, Candidate, TensorType
from tests.kernels.calls import ODD, ROOMY, admitted, copied, faults, hidden_copies, prepare

# Torch transposes a large matrix through a tile of its own.
TILE_BYTES = 60 * 60 * 4


def call(shape: tuple[int, ...], source: str, target: str, dtype: str = "float32") -> Call:
    return Call(conversion(TensorType(shape, dtype)), Candidate("torch_copy", (source, target)))


@pytest.mark.parametrize("extents", [ODD, ROOMY], ids=["odd", "roomy"])
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
        (("ab:byte", "ab"), "ab:byte to ab: a conversion changes the layout, not the storage format"),
    ],
)
def test_where_there_is_nothing_to_convert_it_is_said(forms: tuple[str, str], reason: str | None) -> None:
    found = call((2, 3), *forms)
    assert KERNELS["torch_copy"].refuses(found.subgraph, found.candidate) == reason


def test_an_axis_of_one_element_leaves_nothing_to_convert() -> None:
    found = call((1, 3), "ab", "ba")
    assert KERNELS["torch_copy"].refuses(found.subgraph, found.candidate) is None
    assert faults([found]) == {}
