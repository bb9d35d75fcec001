import pytest

from autotuner.errors import GraphError
from autotuner.ir.graph import Operator
from autotuner.ir.kinds import KINDS, check_operator
from autotuner.ir.records import Scalar


def operator(kind: str, spec: str, **attributes: Scalar) -> Operator:
    """Return an operator with as many made-up operands as its spec has."""
    left, right = spec.split("->")
    inputs = tuple(f"in{i}" for i in range(left.count(",") + 1)) if left else ()
    return Operator("op", kind, spec, inputs, tuple(f"out{i}" for i in range(right.count(",") + 1)),
                    tuple(attributes.items()))  # fmt: skip


VALUES: dict[str, Scalar] = {"query_axis": "q", "key_axis": "k", "dtype": "bfloat16"}


@pytest.mark.parametrize("name", KINDS)
def test_every_example_fits_its_own_kind(name: str) -> None:
    kind = KINDS[name]
    values = VALUES | {"axis": kind.example.partition(",")[0].partition("->")[0][-1:]}
    example = operator(name, kind.example, **{n: values.get(n, 0.5) for n in kind.attributes})
    check_operator(example)
    assert len(example.outputs) == len(kind.makes)


@pytest.mark.parametrize(
    ("kind", "spec", "reason"),
    [
        ("contraction", "ab,cb->ad", "axis 'c' occurs in one operand only"),
        ("contraction", "aab,cb->ac", "axis 'a' occurs twice in 'aab'"),
        ("contraction", "ab->ab", "it needs two inputs and one output"),
        ("bias", "ab,c->ab", "axis 'c' is none of the axes 'ab'"),
        ("add", "ab,ba->ab", "axes 'ba' must be 'ab'"),
        ("relu", "ab->ba", "axes 'ba' must be 'ab'"),
        ("relu", "ab,ab->ab", "it needs 1 inputs and 1 outputs"),
        ("layer_norm_grad_input", "ab,ab,b,b,b->ab", "axes 'b' must be 'a'"),
        ("multiply", "ab,b->ab", "axes 'b' must be 'ab'"),
        ("rms_norm_grad_input", "ab,ab,b,b->ab", "axes 'b' must be 'a'"),
        ("rms_norm_grad_parameters", "ab,ab,a->b,b", "it needs 3 inputs and 1 outputs"),
        ("relu", "aB->aB", "axes 'aB' must be letters a-z"),
    ],
)
def test_a_spec_that_does_not_fit_is_explained(kind: str, spec: str, reason: str) -> None:
    with pytest.raises(GraphError) as caught:
        check_operator(operator(kind, spec))
    assert reason in str(caught.value)
    assert f'write it like "{KINDS[kind].example}"' in str(caught.value)
    assert "operator 'op'" in str(caught.value)


def test_a_softmax_runs_along_one_of_its_axes() -> None:
    with pytest.raises(GraphError, match="attribute axis 'z' is none of the axes 'ab'"):
        check_operator(operator("softmax", "ab->ab,a", axis="z"))
    with pytest.raises(GraphError, match="axes 'a' must be 'b'"):
        check_operator(operator("softmax", "ab->ab,a", axis="a"))


def test_a_causal_mask_hides_keys_along_one_axis_from_queries_along_another() -> None:
    with pytest.raises(GraphError, match="attribute key_axis 'z' is none of the axes 'ab'"):
        check_operator(operator("causal_mask", "ab->ab", query_axis="a", key_axis="z"))
    with pytest.raises(GraphError, match="its attributes query_axis and key_axis name one axis; each wants its own"):
        check_operator(operator("causal_mask", "ab->ab", query_axis="a", key_axis="a"))


def test_a_rotary_turns_one_axis_by_cosines_and_sines_of_the_same_axes() -> None:
    check_operator(operator("rotary", "blnp,blp,blp->blnp", axis="p"))
    with pytest.raises(GraphError, match="axes 'blp' must be 'lp'"):
        check_operator(operator("rotary", "blnp,lp,blp->blnp", axis="p"))
    with pytest.raises(GraphError, match="attribute axis 'z' is none of the axes 'blnp'"):
        check_operator(operator("rotary", "blnp,lp,lp->blnp", axis="z"))


def test_attributes_are_mandatory_and_typed() -> None:
    with pytest.raises(GraphError, match=r"a scale has the attributes \['factor'\], not \[\]"):
        check_operator(operator("scale", "ab->ab"))
    with pytest.raises(GraphError, match="attribute factor of a scale is a float, not 'two'"):
        check_operator(operator("scale", "ab->ab", factor="two"))


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(GraphError, match="no kind 'swish'; known: contraction, bias"):
        check_operator(operator("swish", "ab->ab"))
