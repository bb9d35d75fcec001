"""Why a plan is what it is: figures that add up, and sentences that say what they are."""

from dataclasses import replace

import pytest

from autotuner.errors import NotFoundError
from autotuner.plan.configuration import Configuration
from autotuner.plan.explanation import explain_operator, explain_plan, explain_tensor, weigh
from autotuner.plan.parts import Fusion, Overlap
from autotuner.plan.phrases import binary
from autotuner.plan.step import Alternative
from tests.made_up import small_model
from tests.plan.explained import READS_X, STEPS, TOGETHER, TURNED, explained_configuration, with_again


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Configuration:
    return explained_configuration(small_model(tmp_path_factory.mktemp("models")))


# Alternatives


def test_an_alternative_differs_in_a_form_and_says_what_that_costs_in_the_whole(found: Configuration) -> None:
    weighed = weigh(found, TURNED)
    assert [(d.tensor, d.chosen, d.other) for d in weighed.differences] == [("product", "bf", "fb")]
    assert weighed.same_operators
    assert weighed.words == ("with product as fb in place of bf: +3.1 us in all, at least -0.4 us within the intervals")


def test_what_is_gained_here_and_paid_elsewhere_make_the_difference_in_all(found: Configuration) -> None:
    weighed = weigh(found, TURNED)
    assert (weighed.instead_us, weighed.gained_us, weighed.paid_us) == pytest.approx((10.0, 1.5, 4.6))
    assert weighed.gained_us is not None
    assert weighed.paid_us is not None
    assert weighed.paid_us - weighed.gained_us == pytest.approx(TURNED.extra_us)


def test_a_step_that_an_alternative_covers_in_part_has_no_share_of_its_own_to_be_weighed_against(
    found: Configuration,
) -> None:
    weighed = weigh(found, TOGETHER)
    assert (weighed.same_operators, weighed.instead_us, weighed.gained_us, weighed.paid_us) == (False, None, None, None)
    assert weighed.difference == (
        "with product + biased in one kernel (torch_matmul_bias) and biased as fb in place of bf"
    )


def test_two_whole_steps_are_weighed_against_one_kernel(found: Configuration) -> None:
    whole = Alternative(("product", "biased", "y"), "inductor", (), READS_X, (("y", "bf"),), 1.0, 0.5, 14.0)
    weighed = weigh(found, whole)
    assert (weighed.instead_us, weighed.gained_us, weighed.paid_us) == (16.0, 2.0, 3.0)
    assert weighed.difference == "with product + biased + y in one kernel (inductor)"


def test_an_alternative_in_the_same_forms_differs_by_kernel_and_parameters(found: Configuration) -> None:
    other = replace(TURNED, outputs=(("product", "bf"),), kernel="triton", params=(("block", 32),))
    assert weigh(found, other).difference == "with triton block=32 in place of torch_matmul"


def test_slices_of_different_stacks_read_differently(found: Configuration) -> None:
    sliced = (replace(STEPS[0], outputs=(("product", "b*f@0/2#product+a"),)), *STEPS[1:])
    other = replace(TURNED, outputs=(("product", "b*f@0/2#product+z"),))
    words = weigh(replace(found, steps=sliced), other).difference
    assert words == "with product as b*f@0/2#product+z in place of b*f@0/2#product+a"


def test_an_alternative_without_a_time_of_its_own_has_no_balance(found: Configuration) -> None:
    weighed = weigh(found, replace(TURNED, predicted_us=None))
    assert (weighed.instead_us, weighed.gained_us, weighed.paid_us) == (10.0, None, None)


# Operators


def test_an_operator_says_what_it_loses_and_what_every_other_way_would_cost(found: Configuration) -> None:
    explained = explain_operator(found, "product")
    assert (explained.step, explained.kernel, explained.loss_us) == (1, "torch_matmul", 2.0)
    assert explained.words == (
        "product is computed in forward by torch_matmul.",
        "It reads x as bh, weight as fh.",
        "It writes product as bf.",
        "It takes 10.0 us, 9.0 to 11.5 us within its 95 % interval: 2.0 us above its own best, 8.0 us, in other forms "
        "or with another kernel.",
        "With product as fb in place of bf: +3.1 us in all, at least -0.4 us within the intervals.",
        "It takes 8.5 us itself where 10.0 us are taken now: 1.5 us gained here, 4.6 us paid elsewhere.",
        "The intervals overlap: it could still be the better way.",
        "product + biased in one kernel takes 11.0 us at its fastest (torch_matmul_bias), 13.0 us are taken now, "
        "12.5 us one by one, each at its own fastest: rejected.",
    )


def test_a_fused_operator_says_with_whom_and_how_its_members_compare_alone(found: Configuration) -> None:
    explained = explain_operator(found, "y")
    assert explained.operators == ("biased", "y")
    assert "y is computed in forward by inductor, together with biased." in explained.words
    assert "It takes 6.0 us: nothing that was measured for the same work is faster." in explained.words
    assert (
        "biased + y in one kernel takes 6.0 us, 9.5 us one by one, each at its own fastest: chosen." in explained.words
    )
    assert any(text.startswith("Without this kernel, with product + biased in one kernel") for text in explained.words)
    assert "It takes 12.0 us itself, the rest of the difference lies elsewhere." in explained.words


def test_conversions_of_what_a_step_reads_and_writes_are_its_price(found: Configuration) -> None:
    price = "Paid for it: grad_biased from bf to fb for 2.0 us."
    for name, paid in (("grad_biased", True), ("grad_offset", True), ("grad_x", False)):
        explained = explain_operator(found, name)
        assert (price in explained.words) is paid
        assert len(explained.conversions) == paid


def test_what_was_not_recorded_is_not_made_up(found: Configuration) -> None:
    explained = explain_operator(found, "grad_biased")
    assert explained.alternative is None
    assert "No other way to compute it is recorded." in explained.words
    assert "grad_biased + grad_offset in one kernel: no candidate works or was measured." in explained.words
    bare = replace(found, fusions=(Fusion(("biased", "y"), "inductor", 6.0, 6.0, chosen=True),))
    assert "biased + y in one kernel takes 6.0 us: chosen." in explain_operator(bare, "y").words


def test_an_alternative_that_is_better_is_not_hidden(found: Configuration) -> None:
    better = replace(STEPS[0], alternative=replace(TURNED, extra_us=-1.0, extra_low_us=-2.0))
    words = explain_operator(replace(found, steps=(better, *STEPS[1:])), "product").words
    assert "So the plan is not the best one over what was measured." in words


def test_an_operator_that_backward_repeats_says_where(found: Configuration) -> None:
    explained = explain_operator(with_again(found), "product")
    assert (explained.step, explained.phase, explained.repeated_by) == (1, "forward", (3,))
    assert "Step 3 computes it again, in backward, so that what it makes is not held." in explained.words
    inside = replace(STEPS[2], recomputed=("product",))
    steps = (*STEPS[:2], inside, *STEPS[3:])
    assert explain_operator(replace(found, steps=steps), "product").repeated_by == (3,)


def test_other_candidates_that_could_overtake_are_listed_with_the_operator(found: Configuration) -> None:
    other = replace(TURNED, kernel="triton", extra_us=5.0, extra_low_us=-0.1)
    explained = explain_operator(replace(found, overtaking=(TURNED, other)), "product")
    assert len(explained.overtaking) == 2
    (sentence,) = [text for text in explained.words if text.startswith("It could be overtaken")]
    assert "triton in place of torch_matmul: +5.0 us in all" in sentence
    many = tuple(replace(TURNED, extra_us=float(extra)) for extra in range(4, 10))
    words = explain_operator(replace(found, overtaking=many), "product").words
    assert "1 more candidate could overtake it." in words
    assert sum(text.startswith("It could be overtaken") for text in words) == 5


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("prodct", r"no operator 'prodct' in small:wide: near are product$"),
        ("grad", r"near are grad_x, grad_weight, grad_offset, grad_biased$"),
        ("zzz", r"there are product, biased, y, .*, 1 more$"),
        ("weight", r"near are grad_weight; a tensor has this name$"),
        ("", r"no operator '' in small:wide: there are product"),
    ],
)
def test_a_name_that_is_no_operator_is_refused_with_near_ones(found: Configuration, name: str, sentence: str) -> None:
    with pytest.raises(NotFoundError, match=sentence):
        explain_operator(found, name)


# Tensors


def test_a_tensor_says_who_makes_and_reads_it_in_which_form(found: Configuration) -> None:
    explained = explain_tensor(found, "grad_biased")
    assert [(maker.step, maker.form) for maker in explained.makers] == [(3, "bf"), (4, "fb")]
    assert [(reader.step, reader.form) for reader in explained.readers] == [(4, "bf"), (5, "fb"), (6, "bf"), (7, "bf")]
    assert explained.words == (
        "grad_biased (gradient, float32) is declared bf.",
        "It is made as bf by step 3 (grad_biased, torch_gelu_erf_grad).",
        "It is made as fb by step 4 (a conversion, torch_copy).",
        "It is read as bf by step 4 (a conversion, torch_copy), step 6 (grad_x, torch_matmul), step 7 (grad_weight, "
        "torch_matmul).",
        "It is read as fb by step 5 (grad_offset, torch_bias_grad).",
        "It is converted: grad_biased from bf to fb for 2.0 us.",
        "No recorded alternative of a step has grad_biased in another form.",
    )


def test_other_forms_of_a_tensor_are_priced_in_the_whole_the_cheapest_first(found: Configuration) -> None:
    dearer = replace(TURNED, kernel="triton", extra_us=9.0)
    explained = explain_tensor(replace(found, overtaking=(dearer, TURNED)), "product")
    assert [weighed.alternative.extra_us for weighed in explained.alternatives] == [3.1, 9.0]
    assert explained.words[-2].startswith("product with product as fb in place of bf: +3.1 us in all")
    many = tuple(replace(TURNED, extra_us=float(extra)) for extra in range(4, 10))
    words = explain_tensor(replace(found, overtaking=many), "product").words
    assert words[-1] == "2 more alternatives with product in another form."
    assert sum(text.startswith("product with") for text in words) == 5


def test_a_tensor_that_a_kernel_keeps_inside_takes_no_memory(found: Configuration) -> None:
    kept = (STEPS[0], replace(STEPS[1], outputs=(("y", "bf"),)), *STEPS[2:])
    explained = explain_tensor(replace(found, steps=kept), "biased")
    assert explained.inside == 2
    assert "It takes no memory: inductor keeps it inside, where it computes biased + y in 6.0 us." in explained.words


def test_a_tensor_from_outside_and_one_that_is_made_twice_say_so(found: Configuration) -> None:
    assert "It comes from outside." in explain_tensor(found, "x").words
    again = explain_tensor(with_again(found), "product")
    assert [maker.step for maker in again.makers] == [1, 3]
    assert [reader.step for reader in again.readers] == [2, 4]


def test_a_name_that_is_no_tensor_is_refused_with_near_ones(found: Configuration) -> None:
    with pytest.raises(NotFoundError, match=r"no tensor 'grad_weights' in small:wide: near are grad_weight"):
        explain_tensor(found, "grad_weights")


# The plan


def test_losses_and_conversions_are_listed_with_their_sums_the_greatest_first(found: Configuration) -> None:
    explained = explain_plan(found)
    assert [(loss.step, loss.loss_us) for loss in explained.losses] == [(1, 2.0), (7, 1.5)]
    assert explained.losses_us == 3.5
    assert [(price.tensor, price.predicted_us) for price in explained.conversions] == [("grad_biased", 2.0)]
    assert explained.conversions_us == 2.0
    assert [other.alternative for other in explained.overtaking] == [TURNED]


def test_a_count_of_more_rivals_than_are_listed_is_told(found: Configuration) -> None:
    many = replace(found, counts={"overtaking": 70})
    assert (explain_plan(many).overtaking_count, len(explain_plan(many).overtaking)) == (70, 1)
    assert explain_plan(many).words[-1] == "Within the intervals, 70 candidates could still overtake what was chosen."


def test_the_certificate_is_told_in_sentences(found: Configuration) -> None:
    assert explain_plan(found).words == (
        "The plan's kernels take 42.0 us by their medians, 38.5 to 46.5 us if each stays within its 95 % interval.",
        "No plan takes less than 40.0 us: the proven gap is 5.00%, so this one takes at most 2.0 us more than the best "
        "there can be.",
        "By learned costs the gap is 1.00%: estimated, not proven.",
        "2 steps take 3.5 us above their own best, for the good of the whole: product 2.0 us; grad_weight 1.5 us.",
        "1 conversion, 2.0 us: grad_biased from bf to fb for 2.0 us.",
        "Forward holds 20.0 KiB for backward; a step needs 40.0 KiB at most beside parameters and inputs, as planned; "
        "the budget is 64.0 KiB.",
        "Measured, a step needed 39.0 KiB at most, the planned figure is +2.6% off; eager 80.0 KiB.",
        "Within the intervals, 1 candidate could still overtake what was chosen.",
    )


def test_a_gap_of_nothing_and_one_that_is_not_known_are_told_apart(found: Configuration) -> None:
    proven = replace(found.certificate, lower_bound_us=42.0, proven_gap=0.0)
    assert (
        "By these medians no plan takes less: the proven gap is 0."
        in explain_plan(replace(found, certificate=proven)).words
    )
    unknown = replace(found.certificate, lower_bound_us=0.0, proven_gap=None, estimated_gap=None)
    words = explain_plan(replace(found, certificate=unknown)).words
    assert "How far it is above the best there can be is not known: too much was never measured." in words
    assert not [text for text in words if "learned" in text]


def test_what_neither_loses_nor_converts_is_named_too(found: Configuration) -> None:
    low = replace(found.certificate, lower_bound_us=30.0, proven_gap=0.4)
    (sentence,) = [text for text in explain_plan(replace(found, certificate=low)).words if "between plan" in text]
    assert "6.5 us are neither" in sentence


def test_memory_that_is_not_known_is_not_told(found: Configuration) -> None:
    words = explain_plan(replace(found, memory=None, measured=None)).words
    assert not [text for text in words if "KiB" in text]
    assert found.memory is not None
    unlimited = replace(found, memory=replace(found.memory, budget_bytes=None))
    assert [text for text in explain_plan(unlimited).words if text.endswith("as planned; there is no budget.")]


def test_what_backward_computes_again_is_named(found: Configuration) -> None:
    assert "Backward computes again what is not held: product." in explain_plan(with_again(found)).words


def test_a_plan_without_losses_conversions_and_rivals_says_so(found: Configuration) -> None:
    steps = tuple(replace(step, bound_us=step.predicted_us) for step in STEPS if step.operators)
    words = explain_plan(replace(found, steps=steps, overtaking=())).words
    assert "Every step is at its own best: nothing measured for the same operators is faster." in words
    assert "No tensor is converted." in words
    assert not [text for text in words if "overtake" in text]


def test_bytes_have_three_digits_and_the_unit_that_suits_them() -> None:
    texts = [binary(count) for count in (512, 1_572_864, 20 * 1024, 2**31, 999 * 1024**4, 34 * 10**20)]
    assert texts == ["512 B", "1.50 MiB", "20.0 KiB", "2.00 GiB", "999 TiB", "3.4e+21 B"]


def test_an_overlap_is_told_with_what_it_saves(found: Configuration) -> None:
    overlapping = replace(found, overlap=Overlap(((0,),), 41.3, 37.3, 45.8))
    (words,) = set(explain_plan(overlapping).words) - set(explain_plan(found).words)
    assert words == (
        f"1 of {len(found.steps)} steps run beside the others, on 1 stream of their own: measured on the whole plan, "
        "that saves 41.3 us, 37.3 to 45.8 us by its 95 % interval."
    )
