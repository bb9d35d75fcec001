import json
from typing import Any

import pytest

from autotuner.errors import GraphError
from autotuner.ir.graph import Operator
from autotuner.ir.kinds import KINDS, types_made
from autotuner.ir.operator_checks import check_operator, check_sizes
from autotuner.ir.records import Scalar


def operator(kind: str, spec: str, **attributes: Scalar) -> Operator:
    """Return an operator with as many made-up operands as its spec has."""
    left, right = spec.split("->")
    inputs = tuple(f"in{i}" for i in range(left.count(",") + 1)) if left else ()
    return Operator("op", kind, spec, inputs, tuple(f"out{i}" for i in range(right.count(",") + 1)),
                    tuple(attributes.items()))  # fmt: skip


VALUES: dict[str, Scalar] = {"query_axis": "q", "key_axis": "k", "dtype": "bfloat16", "wrt": 1, "row_axis": "t",
                            "feature_axis": "p", "before": 2, "after": 0, "centred": True}  # fmt: skip
PRODUCT = (
    '{"calls": [["mul.Tensor", ["%0", "%1"], {}]], "inputs": [["float32", [], true], ["float32", [], true]], '
    '"output": ["float32", []], "result": "%2", "saved": [0, 1]}'
)
TURNED = (
    '{"calls": [["permute.default", ["%0", [0, 2, 1]], {}], ["mul.Tensor", ["%1", "%1"], {}]], '
    '"inputs": [["float32", [2, 3, 4], true]], "output": ["float32", [2, 4, 3]], "result": "%2", "saved": [0]}'
)
CHOSEN = (
    '{"calls": [["argmax.default", ["%0", -1, true], {}], ["_to_copy.default", ["%1"], {"dtype": "dtype:float32"}]], '
    '"inputs": [["bfloat16", [3, 4], false]], "output": ["float32", [3, 1]], "result": "%2", "saved": []}'
)


@pytest.mark.parametrize("name", KINDS)
def test_every_example_fits_its_own_kind(name: str) -> None:
    kind = KINDS[name]
    values = VALUES | {"axis": kind.example.partition(",")[0].partition("->")[0][-1:]}
    values["program"] = TURNED if "program" in name else CHOSEN if name == "choice" else PRODUCT
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
        ("relu", "a1->a1", "axes 'a1' must be letters a-z or A-Z"),
        ("relu", "aB->ab", "axes 'ab' must be 'aB'"),
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


def altered(**content: Any) -> str:
    """Return the text of a product, some of it replaced."""
    return json.dumps(json.loads(PRODUCT) | content)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("ab,ba->ab", "axes 'ba' must be 'ab'"),
        ("ab,c->ab", "axis 'c' is none of the axes 'ab'"),
        ("a,a->ab", "axis 'b' of its output is in none of its inputs"),
        ("ab->ab", "a pointwise of its program has 2 inputs, not 1"),
    ],
)
def test_operands_of_an_expression_have_all_axes_or_some(spec: str, reason: str) -> None:
    check_operator(operator("pointwise", "abc,ca->abc", program=PRODUCT))
    check_operator(operator("pointwise", "a,b->ab", program=PRODUCT))
    with pytest.raises(GraphError, match=reason):
        check_operator(operator("pointwise", spec, program=PRODUCT))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "a program is JSON, and this one is not"),
        ("[]", "a program has the keys calls, inputs, output, result, saved, not list"),
        (altered(extra=1), "has the keys calls, inputs, output, result, saved, not"),
        (altered(inputs=[]), "one input at least"),
        (altered(inputs=[["int64", [], True]]), "input 0 of a program has the dtype 'int64'; known: float32"),
        (altered(inputs=[["float32", [0], True]]), r"input 0 of a program has the shape \[0\]"),
        (altered(calls=[]), "has 1 to 512 calls, not 0"),
        (altered(calls=[["os.system('x')", ["%0"], {}]]), "write an overload of aten, such as mul.Tensor"),
        (altered(calls=[["neg.default", ["%2"], {}]]), "call 0 of a program, neg.default, reads %2; it may read"),
        (altered(calls=[["neg.default", ["%0"], {"device": "cuda"}]]), "has the keyword 'device': leave it out"),
        (altered(calls=[["full_like.default", ["%0", "float:big"], {}]]), "names 'float:big'; valid: float:inf"),
        (altered(calls=[["_to_copy.default", ["%0"], {"dtype": "dtype:float8"}]]), "names 'dtype:float8'; known"),
        (altered(calls=[["getitem", ["%0", -1], {}]]), "getitem, takes a value and a place"),
        (altered(result="%1"), "the result of a program is one of its calls, %2 to %2, not '%1'"),
        (altered(saved=[1, 0]), r"lists inputs in order, of \[0, 1\], not \[1, 0\]"),
        (PRODUCT.replace('"%1"', "NaN"), "NaN is written as a text"),
        (PRODUCT.replace('"%1"', "1e999"), "a number that no double holds"),
        (altered(output=["float32", [2]]), "its program have the shape"),
    ],
)
def test_a_text_that_is_no_program_is_explained(text: str, reason: str) -> None:
    with pytest.raises(GraphError, match=f"operator 'op': .*{reason}"):
        check_operator(operator("pointwise", "ab,ab->ab", program=text))


def test_operands_of_a_program_have_the_elements_and_types_of_its_text() -> None:
    turned = operator("program", "blh->bnh", program=TURNED)
    check_sizes(turned, {"b": 2, "l": 3, "h": 4, "n": 3})
    with pytest.raises(
        GraphError, match=r"operator 'op': 'out0' has 16 elements along 'bnh'; its program wants 24, as"
    ):
        check_sizes(turned, {"b": 2, "l": 3, "h": 4, "n": 2})
    assert types_made(turned, ["float32"]) == ("float32",)
    with pytest.raises(GraphError, match="operator 'op': its program reads 'in0' in float32, not in bfloat16"):
        types_made(turned, ["bfloat16"])


def test_a_kind_says_what_it_is_when_a_model_is_read() -> None:
    assert {name for name, kind in KINDS.items() if kind.computed_wide} == {
        "softmax", "sink_softmax", "gelu_erf", "gelu_tanh", "silu", "relu",
    }  # fmt: skip
    assert {name for name, kind in KINDS.items() if kind.inlined} == {
        "scale", "multiply", "cast", "rotary", "gelu_erf", "gelu_tanh", "silu", "relu",
    }  # fmt: skip
    assert {name for name, kind in KINDS.items() if kind.cheap} == {
        "bias", "mask", "scale", "cast", "multiply", "pointwise", "program",
    }  # fmt: skip
    assert {name for name, kind in KINDS.items() if kind.reads_input_again} == {"gelu_erf", "gelu_tanh", "silu"}
    assert {name for name, kind in KINDS.items() if kind.drops_weights} == {
        "packed_attention", "packed_attention_grad", "packed_attention_grad_bias",
    }  # fmt: skip
    assert all(kind.roles.keys() >= kind.first_values.keys() for kind in KINDS.values())
    assert all(len(kind.statistics) == len(kind.makes) - 1 for kind in KINDS.values() if kind.gradient)
    for kind in KINDS.values():
        assert all(place < len(kind.example.partition("->")[0].split(",")) for place in kind.roles), kind.name
        assert kind.name == "contraction" or not kind.placewise or kind.keeps_axes
