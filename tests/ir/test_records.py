import json
import pickle
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.ir.form import ABSENT, Form
from autotuner.ir.records import (
    STATUSES,
    Call,
    Candidate,
    Environment,
    Measurement,
    Node,
    Scalar,
    Status,
    Subgraph,
    TensorType,
    canonical_json,
    digest,
)

MATRIX = TensorType((2, 3), "float32")
SCALED_BIAS = Subgraph(
    nodes=(
        Node("scale", "ab->ab", (0,), (3,), (("factor", 0.5),)),
        Node("bias", "ab,b->ab", (3, 1), (2,), (("axis", "b"),)),
    ),
    tensors=(MATRIX, TensorType((3,), "float32"), MATRIX, MATRIX),
    inputs=(0, 1),
    outputs=(2,),
)
CALL = Call(SCALED_BIAS, Candidate("fused", ("ba", "a", "ab"), (("block", 16), ("exact", True), ("mode", "row"))))

scalars: st.SearchStrategy[Scalar] = st.one_of(
    st.text(max_size=5), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.booleans()
)
pairs = st.lists(st.tuples(st.text(max_size=4), scalars), max_size=3).map(tuple)
numbers = st.lists(st.integers(0, 3), max_size=3).map(tuple)
nodes = st.builds(Node, st.text(max_size=4), st.just("ab,bc->ac"), numbers, numbers, pairs)
tensors = st.builds(
    TensorType, st.lists(st.integers(1, 9), max_size=3).map(tuple), st.sampled_from(["float32", "bool"])
)
subgraphs = st.builds(
    Subgraph, st.lists(nodes, max_size=3).map(tuple), st.lists(tensors, max_size=3).map(tuple), numbers, numbers
)
candidates = st.builds(Candidate, st.text(max_size=4), st.lists(st.just("ab"), max_size=3).map(tuple), pairs)
calls = st.builds(Call, subgraphs, candidates)


def reversed_keys(value: Any) -> Any:
    """Return the same JSON value with the keys of every object in the opposite order."""
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return [reversed_keys(item) for item in value] if isinstance(value, list | tuple) else value


@given(calls)
def test_a_call_written_as_json_and_read_again_is_the_same_call_with_the_same_key(call: Call) -> None:
    read = Call.from_json(json.loads(json.dumps(call.to_json())))
    assert read == call
    assert (read.key, read.subgraph.signature) == (call.key, call.subgraph.signature)


@given(calls)
def test_keys_do_not_depend_on_the_order_in_which_json_lists_its_keys(call: Call) -> None:
    assert Call.from_json(reversed_keys(call.to_json())).key == call.key


def test_canonical_json_sorts_keys_and_has_no_spaces() -> None:
    assert canonical_json({"b": [1, 2.5], "a": {"d": None, "c": True}}) == '{"a":{"c":true,"d":null},"b":[1,2.5]}'


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_canonical_json_refuses_what_json_cannot_say(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json([value])


def test_a_digest_is_sha256_of_the_canonical_json_with_the_schema_version() -> None:
    # printf '[1,{"a":1}]' | sha256sum
    assert digest({"a": 1}) == "c64846ebffd345f97e474f92964d66a16e986e647cc69b707d1f0e8135b222ea"
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def test_another_kernel_form_or_parameter_is_another_call_of_the_same_signature() -> None:
    candidate = CALL.candidate
    others = (
        replace(candidate, kernel="other"),
        replace(candidate, forms=("ab", "a", "ab")),
        replace(candidate, params=(("block", 32), ("exact", True), ("mode", "row"))),
        replace(candidate, params=(("block", 16), ("exact", 1.5), ("mode", "row"))),
    )
    found = [Call(SCALED_BIAS, other) for other in others]
    assert len({call.key for call in (CALL, *found)}) == 5
    assert {call.subgraph.signature for call in found} == {SCALED_BIAS.signature}


def test_a_signature_tells_kinds_specs_extents_dtypes_attributes_and_boundaries_apart() -> None:
    scale, bias = SCALED_BIAS.nodes
    others = (
        replace(SCALED_BIAS, nodes=(replace(scale, kind="dropout"), bias)),
        replace(SCALED_BIAS, nodes=(replace(scale, spec="ba->ba"), bias)),
        replace(SCALED_BIAS, nodes=(replace(scale, attributes=(("factor", 0.25),)), bias)),
        replace(SCALED_BIAS, tensors=(*SCALED_BIAS.tensors[:3], TensorType((2, 4), "float32"))),
        replace(SCALED_BIAS, tensors=(*SCALED_BIAS.tensors[:3], TensorType((2, 3), "bfloat16"))),
        replace(SCALED_BIAS, outputs=(2, 3)),
    )
    assert len({SCALED_BIAS.signature, *(other.signature for other in others)}) == 7


def test_the_boundary_is_inputs_then_outputs() -> None:
    assert SCALED_BIAS.boundary == (0, 1, 2)
    assert SCALED_BIAS.kinds == ("scale", "bias")


def test_axes_of_a_tensor_are_letters_in_declared_order() -> None:
    assert TensorType((8, 4, 2), "float32").axes == "abc"


def test_the_forms_of_a_candidate_are_parsed_absent_ones_included() -> None:
    assert Candidate("k", ("ba", "absent")).parsed_forms() == (Form.parse("ba"), ABSENT)


def test_a_measurement_written_as_json_and_read_again_is_the_same() -> None:
    for measurement in (
        Measurement("ok", 1.5, 1.25, 1.75, (1.5, 0.1 + 0.2, 5e-324), 4096),
        Measurement("wrong", message="element 3 is NaN"),
    ):
        assert Measurement.from_json(json.loads(json.dumps(measurement.to_json()))) == measurement


def test_exactly_the_ok_measurements_have_a_time() -> None:
    with pytest.raises(ValueError, match="'ok' and median None"):
        Measurement("ok")
    with pytest.raises(ValueError, match=r"'timeout' and median 1\.0"):
        Measurement("timeout", 1.0)


def test_the_list_of_statuses_names_every_status() -> None:
    assert get_args(Status) == STATUSES


def test_an_environment_with_another_fact_or_policy_has_another_key() -> None:
    environment = Environment("cpu", "Xeon", (("threads", 2),), (("cache", "warm"),))
    others = (
        replace(environment, device_name="EPYC"),
        replace(environment, facts=(("threads", 4),)),
        replace(environment, policy=(("cache", "cold"),)),
        replace(environment, facts=(("threads", 2), ("cache", "warm")), policy=()),
    )
    assert len({environment.key, *(other.key for other in others)}) == 5
    assert environment.key == replace(environment).key


def test_an_environment_as_json_names_its_facts() -> None:
    assert Environment("cpu", "Xeon", (("threads", 2),)).to_json() == {
        "device_type": "cpu",
        "device_name": "Xeon",
        "facts": {"threads": 2},
        "policy": {},
    }


def test_a_subgraph_that_another_process_reads_is_hashed_anew() -> None:
    subgraph = Subgraph((Node("gelu_erf", "ab->ab", (0,), (1,)),), (MATRIX, MATRIX), (0,), (1,))
    hash(subgraph)
    read = pickle.loads(pickle.dumps(subgraph))
    assert "_hash" not in vars(read)
    assert {read} == {subgraph}
