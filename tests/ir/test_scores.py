"""Programs that change the scores of attention: scales, soft caps, sums and fills are found, and nothing else."""

from typing import Any

import pytest

from autotuner.ir.program import parse_program
from autotuner.ir.records import canonical_json
from autotuner.ir.scores import Hidden, Pieces, cap_of, pieces_of, soft_cap


def program(*calls: tuple[Any, ...], inputs: int = 1, dtype: str = "float32") -> Any:
    text = canonical_json(
        {
            "calls": [[name, list(arguments), {}] for name, *arguments in calls],
            "inputs": [[dtype, [], place == 0] for place in range(inputs)],
            "output": [dtype, []],
            "result": f"%{inputs + len(calls) - 1}",
            "saved": [],
        }
    )
    return parse_program(text)


def test_a_scale_a_cap_and_a_mask_are_found_in_order() -> None:
    gemma = program(
        ("mul.Tensor", "%0", 0.0625), ("div.Tensor", "%2", 50.0), ("tanh.default", "%3"), ("mul.Tensor", "%4", 50.0),
        ("add.Tensor", "%5", "%1"), inputs=2,
    )  # fmt: skip
    assert pieces_of(gemma) == Pieces(0.0625, 50.0, (1,))


def test_a_cap_that_is_no_inverse_of_what_comes_before_scales_as_well() -> None:
    found = pieces_of(program(("mul.Tensor", "%0", 0.5), ("tanh.default", "%1"), ("mul.Tensor", "%2", 6.0)))
    assert found == Pieces(3.0, 6.0, ())


@pytest.mark.parametrize(
    ("condition", "filled", "hidden"),
    [
        ([("ne.Scalar", "%1", 0)], "float:-inf", Hidden(1, False, True)),
        ([("ne.Scalar", "%1", 0)], -1e9, Hidden(1, False)),
        ([("eq.Scalar", "%1", 0)], "float:-inf", Hidden(1, True, True)),
        ([("ne.Scalar", "%1", 0), ("logical_not.default", "%2")], -1e9, Hidden(1, True)),
    ],
)
def test_a_fill_hides_keys_where_its_condition_holds(
    condition: list[tuple[Any, ...]], filled: float | str, hidden: Hidden
) -> None:
    last = f"%{1 + len(condition)}"
    found = pieces_of(program(*condition, ("masked_fill.Scalar", "%0", last, filled), inputs=2))
    assert found == Pieces(1.0, None, (), (hidden,))


@pytest.mark.parametrize(
    "calls",
    [
        [("sigmoid.default", "%0")],
        [("tanh.default", "%0"), ("tanh.default", "%1")],
        [("div.Tensor", 1.0, "%0")],
        [("tanh.default", "%0"), ("mul.Tensor", "%1", -2.0)],
        [("mul.Tensor", "%0", "%0")],
        [("add.Tensor", "%0", 1.0)],
    ],
)
def test_other_expressions_are_left_alone(calls: list[tuple[Any, ...]]) -> None:
    assert pieces_of(program(*calls)) is None


def test_a_fill_with_a_small_number_hides_nothing() -> None:
    assert pieces_of(program(("ne.Scalar", "%1", 0), ("masked_fill.Scalar", "%0", "%2", -1.0), inputs=2)) is None


def test_numbers_behind_a_sum_are_no_scale() -> None:
    assert pieces_of(program(("add.Tensor", "%0", "%1"), ("mul.Tensor", "%2", 2.0), inputs=2)) is None


def test_a_cap_alone_has_a_number_and_nothing_else_has() -> None:
    assert cap_of(soft_cap(30.0, "bfloat16").text) == 30.0
    assert cap_of(program(("mul.Tensor", "%0", 2.0)).text) is None
    assert cap_of(program(("tanh.default", "%0")).text) == 1.0
    assert cap_of(program(("add.Tensor", "%0", "%1"), inputs=2).text) is None
