"""Roofline: what so much work takes at least, and that no call which was recorded took less."""

import pytest

from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.measure.roofline import NO_ROOFLINE, Ladder, Roofline, Work, work_of

LADDER = Ladder(((100.0, 10.0), (200.0, 12.0), (400.0, 40.0)))


def call(nodes: tuple[Node, ...], tensors: tuple[TensorType, ...], forms: tuple[str, ...]) -> Call:
    inputs, outputs = tuple(range(len(tensors) - 1)), (len(tensors) - 1,)
    return Call(Subgraph(nodes, tensors, inputs, outputs), Candidate("torch_matmul", forms))


@pytest.mark.parametrize(
    ("amount", "least_us"),
    [
        (0.0, 0.0),
        (50.0, 3.0),  # at the best rate, 200 in 12 us
        (100.0, 10.0),
        (150.0, 10.0),  # as the rung below
        (200.0, 12.0),
        (300.0, 18.0),  # at 200 in 12 us: more than the rung below takes
        (800.0, 80.0),
    ],
)
def test_work_takes_as_long_as_less_of_it_and_goes_no_faster_than_more_of_it(amount: float, least_us: float) -> None:
    assert LADDER.least_us(amount) == pytest.approx(least_us)


def test_a_stall_at_one_rung_does_not_make_less_work_seem_slow() -> None:
    stalled = Ladder(((100.0, 500.0), (200.0, 12.0)))
    assert stalled.least_us(100.0) == 12.0


def test_a_rung_must_rise_and_take_time() -> None:
    for rungs in (((2.0, 1.0), (1.0, 1.0)), ((0.0, 1.0),), ((1.0, 0.0),)):
        with pytest.raises(ValueError, match="are no ladder"):
            Ladder(rungs)


def test_what_was_measured_to_be_faster_lowers_the_ladder_there_and_not_elsewhere() -> None:
    lowered = LADDER.lowered([(300.0, 15.0), (150.0, 11.0)])
    assert lowered.least_us(300.0) == 15.0
    assert lowered.rungs == (*LADDER.rungs[:2], (300.0, 15.0), LADDER.rungs[2])
    assert lowered.least_us(800.0) == LADDER.least_us(800.0)


def test_a_call_takes_the_most_of_starting_moving_and_multiplying() -> None:
    ceilings = Roofline(2.0, Ladder(((100.0, 5.0),)), {"float32": Ladder(((1000.0, 9.0),))})
    assert ceilings.optimistic_us(Work(1.0, {})) == 2.0
    assert ceilings.optimistic_us(Work(100.0, {})) == 5.0
    assert ceilings.optimistic_us(Work(100.0, {"float32": 1000.0})) == 9.0
    assert ceilings.optimistic_us(Work(100.0, {"bfloat16": 1000.0})) == 5.0, "of bfloat16 nothing is known"
    assert NO_ROOFLINE.optimistic_us(Work(100.0, {"float32": 1000.0})) == 0.0


def test_ceilings_say_of_no_measured_call_that_it_takes_longer() -> None:
    ceilings = Roofline(2.0, Ladder(((100.0, 5.0),)), {"float32": Ladder(((1000.0, 9.0),))})
    measured = [(Work(150.0, {"float32": 3000.0}), 4.0), (Work(10.0, {}), 1.5)]
    lowered = ceilings.lowered(measured)
    assert all(lowered.optimistic_us(work) <= us for work, us in measured)
    assert lowered.optimistic_us(Work(1.0, {})) == 1.5


def test_an_absent_tensor_moves_nothing_and_a_mask_of_bytes_a_byte_for_each_element() -> None:
    tensors = (TensorType((8, 4), "float32"),) * 3
    dropped = call((Node("dropout", "ab,ab->ab", (0, 1), (2,), (("p", 0.5),)),), tensors, ("ab", "ab:byte", "absent"))
    assert work_of(dropped) == Work(8 * 4 * 4 + 8 * 4, {})


def test_a_product_takes_two_flop_per_step_and_half_of_them_under_a_causal_mask() -> None:
    tensors = (TensorType((8, 4), "bfloat16"), TensorType((2, 4), "bfloat16"), TensorType((8, 2), "bfloat16"))
    product = Node("contraction", "ab,cb->ac", (0, 1), (2,))
    assert work_of(call((product,), tensors, ("ab", "ab", "ab"))) == Work(
        2 * (32 + 8 + 16), {"bfloat16": 2 * 8 * 4 * 2}
    )
    attributes = (("query_axis", "a"), ("key_axis", "b"))
    masked = Node("causal_mask", "ab->ab", (2,), (3,), attributes)
    both = call((product, masked), (*tensors, tensors[2]), ("ab", "ab", "absent", "ab"))
    assert work_of(both).flop == {"bfloat16": 8 * 4 * 2}


def test_ceilings_come_back_from_facts_beside_others() -> None:
    products = {"float32": Ladder(((1000.0, 9.0),)), "bfloat16": LADDER}
    ceilings = Roofline(2.0, LADDER, products)
    others = {
        "noise_floor": 0.01,
        "ceiling_us to_device 4096": 3.0,
    }  # of the host's link, in earlier databases
    assert Roofline.from_facts(ceilings.to_facts() | others) == ceilings
    assert Roofline.from_facts({"noise_floor": 0.01}) == NO_ROOFLINE
    assert ceilings.lacking(["float16", "float32"]) == ["float16"]


def test_the_least_of_two_moments_counts() -> None:
    one = Roofline(2.0, Ladder(((100.0, 5.0), (200.0, 6.0))))
    other = Roofline(1.0, Ladder(((100.0, 7.0), (200.0, 5.5))))
    assert one.least(other) == Roofline(1.0, Ladder(((100.0, 5.0), (200.0, 5.5))))
