"""Dropout masks from a counter-based generator, compiled once here: an odd number of elements, in another order."""

import pytest
import torch

import autotuner.kernels.rules  # noqa: F401  (registers every kernel)
from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.rules.conversion import conversion
from autotuner.kernels.torch.masks import drawn_keeps, threefry_bits
from tests.kernels.calls import copied, faults, prepare

DRAW = Subgraph((Node("dropout_mask", "->ab", (), (0,), (("p", 0.25),)),), (TensorType((37, 41), "float32"),), (), (0,))
CALL = Call(DRAW, Candidate("inductor_threefry", ("ba",)))
SEED = Call(DRAW, Candidate("torch_seed", ("ba:seed",)))


def test_the_rule_enumerates_every_order_of_a_raw_mask() -> None:
    assert list(KERNELS["inductor_threefry"].layouts(DRAW)) == [("ab",), ("ba",)]


@pytest.fixture(scope="module")
def drawn() -> list[torch.Tensor]:
    """Masks of three seeds, the third equal to the first."""
    assert faults([CALL]) == {}
    made = prepare(CALL)
    (mask,) = (tensor for tensor in made.outputs if tensor is not None)
    masks = []
    for seed in (1, 2, 1):
        torch.default_generator.manual_seed(seed)
        made.run()
        masks.append(mask.clone())
    return masks


@pytest.mark.slow
def test_a_mask_of_bytes_keeps_what_the_raw_one_keeps(drawn: list[torch.Tensor]) -> None:
    call = Call(DRAW, Candidate("inductor_threefry_bytes", ("ba:byte",)))
    assert faults([call]) == {}
    made = prepare(call)
    (kept,) = (tensor for tensor in made.outputs if tensor is not None)
    torch.default_generator.manual_seed(2)
    made.run()
    assert kept.dtype == torch.bool
    assert torch.equal(kept, drawn[1] != 0)


def test_a_mask_repeats_with_its_seed_and_holds_zero_or_the_scale(drawn: list[torch.Tensor]) -> None:
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    assert set(drawn[0].flatten().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}


def test_masks_of_two_seeds_and_neighbours_in_one_mask_are_independent(drawn: list[torch.Tensor]) -> None:
    # 1,517 draws: six standard deviations of the share that two independent masks keep together.
    kept = [mask.t().flatten() != 0 for mask in drawn]
    expected, spread = 0.75**2, 6 * (0.75**2 * (1 - 0.75**2) / 1517) ** 0.5
    assert abs(float((kept[0] & kept[1]).double().mean()) - expected) < spread
    assert abs(float((kept[0][1:] & kept[0][:-1]).double().mean()) - expected) < spread


def test_the_compiler_buffers_the_mask_once_at_most(drawn: list[torch.Tensor]) -> None:
    ((_, found),) = copied([CALL])
    assert found.clones == 0
    # Its four parts are of equal length, the last one cut.
    assert sum(found.allocated) <= 4 * (drawn[0].numel() + 3)


def test_words_are_those_of_threefry_with_thirteen_rounds() -> None:
    # The known answer of threefry2x32 with 13 rounds for counter 0 and key 0.
    key, counter = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    words = [int(word) & 0xFFFFFFFF for word in threefry_bits(key, counter)]
    assert words == [0x9D1C5EC6, 0x8BD50731]


def test_a_seed_exists_for_every_order_and_is_eight_bytes_drawn_from_the_generator() -> None:
    assert list(KERNELS["torch_seed"].layouts(DRAW)) == [("ab:seed",), ("ba:seed",)]
    assert faults([SEED]) == {}
    made = prepare(SEED)
    (seed,) = (tensor for tensor in made.outputs if tensor is not None)
    assert (seed.nbytes, seed.dtype) == (8, torch.int64)
    drawn = []
    for number in (1, 2, 1):
        torch.default_generator.manual_seed(number)
        made.run()
        drawn.append(int(seed))
    assert drawn[0] == drawn[2] != drawn[1]
    assert KERNELS["torch_seed"].refuses(DRAW, Candidate("torch_seed", ("ab",))) == "it makes a seed; ab is none"


@pytest.mark.slow
def test_an_expanded_seed_is_the_mask_that_would_have_been_drawn_and_the_same_again_in_backward(
    drawn: list[torch.Tensor],
) -> None:
    expand = Call(conversion(TensorType((37, 41), "float32"), 0.25), Candidate("inductor_expand", ("ba:seed", "ba")))
    makes, forward, backward = prepare(SEED), prepare(expand), prepare(expand)
    (seed,) = (tensor for tensor in makes.outputs if tensor is not None)
    torch.default_generator.manual_seed(2)
    makes.run()
    for made in (forward, backward):
        (operand,), (mask,) = made.inputs, made.outputs
        assert operand is not None
        assert mask is not None
        operand.copy_(seed)
        made.run()
        assert torch.equal(mask, drawn[1])


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 32768])
def test_what_a_seed_keeps_is_unbiased_and_meets_p(p: float) -> None:
    # Four million draws: six standard deviations, and half a step of 16 bits.
    key, counter = torch.tensor([12345, -6789], dtype=torch.int32), torch.arange(1 << 20, dtype=torch.int32)
    parts = drawn_keeps(key, counter, p)
    for part in parts:
        spread = 6 * (p * (1 - p) / len(part)) ** 0.5
        assert abs(float(part.double().mean()) - (1 - p)) < spread + 2**-17
    expected, spread = (1 - p) ** 2, 6 * ((1 - p) ** 2 * (1 - (1 - p) ** 2) / (1 << 20)) ** 0.5
    assert abs(float((parts[0] & parts[1]).double().mean()) - expected) < spread + 2**-16
