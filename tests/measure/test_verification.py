"""What verification finds, kernel by planted kernel."""

import math
import re

import pytest
import torch

import autotuner.kernels.rules  # noqa: F401  (registers the real kernels)
from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels.registry import KERNELS
from autotuner.kernels.rules.conversion import conversion
from autotuner.measure.operands import Buffers, Values
from autotuner.measure.verification import References, deviation, fault, implausible_mask, passes_at_once

T = TensorType((32, 32), "float32")
MASK = Subgraph((Node("dropout_mask", "->ab", (), (0,), (("p", 0.25),)),), (T,), (), (0,))
DROP = Subgraph((Node("dropout", "ab,ab->ab", (0, 1), (2,), (("p", 0.25),)),), (T,) * 3, (0, 1), (2,))
BOTH = Subgraph((Node("dropout_mask", "->ab", (), (1,), (("p", 0.25),)),
                 Node("dropout", "ab,ab->ab", (0, 1), (2,), (("p", 0.25),))), (T,) * 3, (0,), (1, 2))  # fmt: skip
ADD = Subgraph((Node("add", "ab,ab->ab", (0, 1), (2,)),), (T,) * 3, (0, 1), (2,))
CAUSAL = Subgraph((Node("causal_mask", "ab->ab", (0,), (1,), (("key_axis", "b"), ("query_axis", "a"))),),
                  (T, T), (0,), (1,))  # fmt: skip
PACK = conversion(T, 0.25)
TURN = Subgraph((Node("conversion", "ab->ba", (0,), (1,)),), (T, T), (0,), (1,))

pytestmark = pytest.mark.usefixtures("planted")


def found(kernel: str, subgraph: Subgraph, *forms: str) -> str | None:
    call = Call(subgraph, Candidate(kernel, forms))
    values, buffers = Values(subgraph), Buffers()
    inputs, outputs = buffers.inputs(call, values, 0), buffers.outputs(call, values, 0)
    run = KERNELS[kernel].builder()(call, inputs, outputs)
    return fault(call, KERNELS[kernel], run, values, References(), inputs, outputs)


def at_once(kernel: str, subgraph: Subgraph, *forms: str) -> bool:
    call = Call(subgraph, Candidate(kernel, forms))
    values, references = Values(subgraph), References()
    for inputs, outputs in Buffers().sets(call, values, 1):
        run = KERNELS[kernel].builder()(call, inputs, outputs)
    return passes_at_once(call, KERNELS[kernel], run, values, references, inputs, outputs)


@pytest.mark.parametrize("forms", [("ab", "ab", "ab"), ("ba", "ab", "ba"), ("*ab@1/2", "a*b@0/3", "a*b@1/2")])
def test_one_number_says_that_a_good_kernel_is_good(forms: tuple[str, ...]) -> None:
    assert at_once("planted_good", ADD, *forms)


@pytest.mark.parametrize("kernel", ["wrong", "not_a_number", "unwritten", "modifies", "resizes"])
def test_one_number_lets_no_fault_through(kernel: str) -> None:
    assert not at_once(f"planted_{kernel}", ADD, "ab", "ab", "ab")


def test_one_number_is_not_enough_for_a_neighbour_that_was_written_to_masks_and_infinities() -> None:
    assert not at_once("planted_spills", ADD, "ab", "ab", "*ab@1/2")
    assert not at_once("planted_draws", MASK, "ab")
    assert not at_once("torch_causal_mask", CAUSAL, "ab", "ab")


@pytest.mark.parametrize("forms", [("ab", "ab", "ab"), ("ba", "ab", "ba"), ("*ab@1/2", "a*b@0/3", "a*b@1/2")])
def test_a_good_kernel_passes_in_any_form(forms: tuple[str, ...]) -> None:
    assert found("planted_good", ADD, *forms) is None


@pytest.mark.parametrize(
    ("kernel", "sentence"),
    [
        ("wrong", r"output 0 differs .* 1 of 1024 elements, most at \(1, 2\)"),
        ("not_a_number", r"output 0 is nan in 1 of 1024 elements, first at \(0, 1\)"),
        ("unwritten", r"output 0 is nan in 32 of 1024 elements, first at \(0, 0\)"),
        ("modifies", "it modified input 1"),
    ],
)
def test_a_planted_fault_is_found_and_said(kernel: str, sentence: str) -> None:
    reason = found(f"planted_{kernel}", ADD, "ab", "ab", "ab")
    assert reason is not None
    assert re.search(sentence, reason)


def test_writing_into_a_neighbour_of_the_stack_is_found() -> None:
    assert found("planted_good", ADD, "ab", "ab", "*ab@1/2") is None
    assert found("planted_spills", ADD, "ab", "ab", "*ab@1/2") == (
        "it wrote beside its outputs, into another slice of their stack"
    )


def test_an_output_of_another_shape_is_found() -> None:
    reason = found("planted_resizes", ADD, "ab", "ab", "ab")
    assert reason is not None
    assert "left output 0 with shape (2, 64)" in reason


def test_a_kernel_that_relies_on_adjacent_slices_gets_them() -> None:
    nodes = (Node("add", "ab,ab->ab", (0, 1), (4,)), Node("add", "ab,ab->ab", (4, 2), (3,)))
    sum_of_three = Subgraph(nodes, (T,) * 5, (0, 1, 2), (3,))
    assert found("planted_slices", sum_of_three, "a*b@0/3", "a*b@1/3", "a*b@2/3", "ab") is None


@pytest.mark.parametrize("form", ["ab", "ba", "a*b@1/2"])
def test_minus_infinity_where_the_reference_has_it_is_no_fault(form: str) -> None:
    assert found("torch_causal_mask", CAUSAL, form, form) is None


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        ((0, 5), 1.0, r"differs .* in 1 of 1024 elements, most at \(0, 5\): 1 instead of -inf, off by inf"),
        ((0, 5), math.inf, r"differs .* in 1 of 1024 elements, most at \(0, 5\): inf instead of -inf, off by inf"),
        ((0, 5), math.nan, r"differs .* in 1 of 1024 elements, most at \(0, 5\): nan instead of -inf, off by inf"),
        ((5, 0), -math.inf, r"is -inf in 1 of 1024 elements, first at \(5, 0\), where the reference is finite"),
        ((5, 0), 1.5, r"differs .* in 1 of 1024 elements, most at \(5, 0\): 1.5 instead of 1, off by 0.5"),
    ],
)
def test_a_fault_beside_infinite_elements_is_found(place: tuple[int, int], value: float, sentence: str) -> None:
    reference = torch.ones(32, 32).masked_fill(torch.ones(32, 32).triu(1) > 0, -math.inf)
    result = reference.clone()
    call = Call(CAUSAL, Candidate("torch_causal_mask", ("ab", "ab")))
    assert deviation(call, result, reference.double()) is None
    result[place] = value
    reason = deviation(call, result, reference.double())
    assert reason is not None
    assert re.search(sentence, reason), reason


@pytest.mark.parametrize("form", ["ab", "ba", "ab:byte"])
def test_an_honest_mask_passes(form: str) -> None:
    assert found("planted_draws", MASK, form) is None


@pytest.mark.parametrize(
    ("kernel", "form", "sentence"),
    [
        ("draws_too_few", "ab:byte", "keeps 0.48"),
        ("draws_too_few", "ab", "holds 1; it may hold 0 and 1.33333 only"),
        ("draws_half", "ab:byte", "between two runs from the same seed"),
        ("draws_the_same", "ab:byte", "the same whatever the generator's seed"),
    ],
)
def test_a_dishonest_mask_is_found(kernel: str, form: str, sentence: str) -> None:
    reason = found(f"planted_{kernel}", MASK, form)
    assert reason is not None
    assert sentence in reason


def test_what_is_computed_from_a_drawn_mask_is_verified_with_that_mask() -> None:
    assert found("planted_drops", BOTH, "ab", "ab", "ab") is None


def test_a_byte_mask_is_verified_with_its_scale() -> None:
    assert found("planted_drops_byte", DROP, "ab", "ab:byte", "ab") is None
    reason = found("planted_drops_byte", DROP, "ab", "ab", "ab")
    assert reason is not None
    assert "differs from the reference" in reason


def test_a_mask_may_miss_its_share_by_chance_only() -> None:
    mask = torch.ones(10_000, dtype=torch.bool)
    mask[:1000] = False
    assert implausible_mask(mask, 0.1, 0.1) is None
    assert implausible_mask(mask, 0.12, 0.12) is not None
    assert implausible_mask(mask.float(), 0.1, 0.1) is not None


def test_a_kernel_that_drops_whole_256ths_is_held_to_these() -> None:
    mask = torch.ones(1 << 22, dtype=torch.bool)
    mask[: 26 << 14] = False  # 26 of 256, where p is 0.1
    assert implausible_mask(mask, 0.1, 26 / 256) is None
    assert implausible_mask(mask, 0.1, 0.1) == (
        "keeps 0.898438 of 4194304 elements; where p = 0.1 it is to keep 0.900000 within 0.000887"
    )


@pytest.mark.slow
def test_a_conversion_must_turn_the_axes_as_its_spec_says() -> None:
    assert found("torch_copy", TURN, "ab", "ab") is None
    reason = found("planted_copies_unturned", TURN, "ab", "ab")
    assert reason is not None
    assert "differs from the reference" in reason


def test_bits_and_seeds_are_verified_by_the_masks_that_they_stand_for() -> None:
    assert found("planted_packs", PACK, "ab", "ab:bit") is None
    assert found("planted_packs", PACK, "ab:byte", "ab:bit") is None
    assert found("planted_seeds", MASK, "ba:seed") is None


@pytest.mark.parametrize(
    ("kernel", "subgraph", "forms", "sentence"),
    [
        ("packs_backwards", PACK, ("ab", "ab:bit"), r"output 0 differs from the reference in \d+ of 1024 elements"),
        ("packs_but_the_last", PACK, ("ab", "ab:bit"), "output 0 differs in 1 of 128 elements between two runs"),
        ("seeds_the_same", MASK, ("ab:seed",), "the dropout mask is the same whatever the generator's seed"),
        ("seeds_nothing", MASK, ("ab:seed",), "output 0 differs in 1 of 1 elements between two runs"),
    ],
)
def test_a_fault_of_bits_or_a_seed_is_found(
    kernel: str, subgraph: Subgraph, forms: tuple[str, ...], sentence: str
) -> None:
    reason = found(f"planted_{kernel}", subgraph, *forms)
    assert reason is not None
    assert re.search(sentence, reason), reason
