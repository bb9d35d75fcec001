"""Normalised inputs of norms, in a type of their own, and gradients from these: every layout row of torch's kernels."""

import pytest

from autotuner.ir.records import Call, Candidate, Node, Scalar, Subgraph, TensorType
from autotuner.kernels import KERNELS
from tests.kernels.calls import faults

EXTENTS = {"a": 3, "b": 4, "c": 5}
WHOLE, STATISTIC = "abc", "ab"
SPECS: tuple[tuple[str, str, dict[str, Scalar]], ...] = (
    ("normalised", "abc,ab,ab->abc", {"dtype": ""}),
    ("normalised", "abc,ab->abc", {"dtype": ""}),
    ("normalised_grad_input", "abc,abc,c,ab->abc", {"centred": True}),
    ("normalised_grad_input", "abc,abc,c,ab->abc", {"centred": False}),
    ("normalised_grad_input", "abc,abc,ab->abc", {"centred": True}),
    ("normalised_grad_parameters", "abc,abc->c,c", {}),
    ("normalised_grad_parameters", "abc,abc->c", {}),
)


def subgraph(kind: str, spec: str, attributes: dict[str, Scalar], kept: str) -> Subgraph:
    """Return one operator in float32, but for what was normalised."""
    left, right = (side.split(",") for side in spec.split("->"))
    place = len(left) if kind == "normalised" else 1
    types = [
        TensorType(tuple(EXTENTS[axis] for axis in axes), kept if number == place else "float32")
        for number, axes in enumerate(left + right)
    ]
    inputs, outputs = tuple(range(len(left))), tuple(range(len(left), len(types)))
    told = tuple((name, kept if name == "dtype" else value) for name, value in attributes.items())
    return Subgraph((Node(kind, spec, inputs, outputs, told),), tuple(types), inputs, outputs)


@pytest.mark.parametrize("kept", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("kind", "spec", "attributes"), SPECS)
def test_every_layout_row_equals_the_reference(kind: str, spec: str, attributes: dict[str, Scalar], kept: str) -> None:
    kernel, one = KERNELS[f"torch_{kind}"], subgraph(kind, spec, attributes, kept)
    rows = (Candidate(kernel.name, row) for row in kernel.layouts(one))
    found = [Call(one, row) for row in rows if kernel.refuses(one, row) is None]
    assert len(found) == 6
    assert faults(found) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "spec", "attributes"), SPECS)
def test_the_generic_compiler_computes_it(kind: str, spec: str, attributes: dict[str, Scalar]) -> None:
    one = subgraph(kind, spec, attributes, "bfloat16")
    row = tuple(one.tensors[number].axes for number in one.boundary)
    assert faults([Call(one, Candidate("inductor", row))]) == {}
