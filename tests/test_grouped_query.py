"""Grouped-query attention as a model file: heads that share a key, up to a training step."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autotuner.database import open_database
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model, load_model
from autotuner.runtime import TrainingStep
from autotuner.space import build_space, load_space, space_file
from autotuner.tuner import TuningPolicy
from tests.kernels.calls import faults
from tests.made_up import times, without_compilers
from tests.tuner.asking import Asking, tune

pytestmark = pytest.mark.slow

GROUPED = """
version: 1
name: grouped-query
axes: {b: batch, l: position, h: hidden, g: key head, r: query head of a key head, p: feature}
presets:
  tiny: {b: 2, l: 5, h: 6, g: 2, r: 3, p: 4}
inputs: {x: {axes: blh}}
parameters: {query_weight: grph, key_weight: gph, value_weight: gph, output_weight: hgrp}
operators:
  - {name: query, kind: contraction, spec: "blh,grph->blgrp", inputs: [x, query_weight], outputs: [query]}
  - {name: key, kind: contraction, spec: "blh,gph->blgp", inputs: [x, key_weight], outputs: [key]}
  - {name: value, kind: contraction, spec: "blh,gph->blgp", inputs: [x, value_weight], outputs: [value]}
  - {name: scores, kind: contraction, spec: "bqgrp,bkgp->bgrqk", inputs: [query, key], outputs: [scores]}
  - name: scaled_scores
    kind: scale
    spec: bgrqk->bgrqk
    inputs: [scores]
    outputs: [scaled_scores]
    attributes: {factor: {inverse_sqrt: p}}
  - name: attention
    kind: softmax
    spec: bgrqk->bgrqk,bgrq
    inputs: [scaled_scores]
    outputs: [attention, attention_logsumexp]
    attributes: {axis: k}
  - {name: context, kind: contraction, spec: "bgrqk,bkgp->bqgrp", inputs: [attention, value], outputs: [context]}
  - {name: y, kind: contraction, spec: "blgrp,hgrp->blh", inputs: [context, output_weight], outputs: [y]}
outputs: [y]
"""


@pytest.fixture
def model(tmp_path: Path) -> Model:
    path = tmp_path / "grouped_query.yaml"
    path.write_text(GROUPED)
    return load_model(str(path)).instantiate("tiny", dtype="float64")


def autograd(known: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the output and every gradient of the same attention, written as one would without the project."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in known.items() if name != "grad_y"}
    x = leaves["x"]
    query = torch.einsum("blh,grph->bgrlp", x, leaves["query_weight"])
    key, value = (torch.einsum("blh,gph->bglp", x, leaves[f"{name}_weight"]) for name in ("key", "value"))
    key, value = (tensor.unsqueeze(2).expand_as(query) for tensor in (key, value))
    context = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    y = torch.einsum("bgrlp,hgrp->blh", context, leaves["output_weight"])
    gradients = torch.autograd.grad(y, list(leaves.values()), known["grad_y"])
    return {"y": y.detach()} | {f"grad_{name}": grad for name, grad in zip(leaves, gradients, strict=True)}


def values(model: Model) -> dict[str, Tensor]:
    graph = training_graph(model.graph())
    draw = torch.Generator().manual_seed(0)
    given = [name for name, tensor in graph.tensors.items() if tensor.role in ("input", "parameter")]
    return {
        name: torch.randn(graph.shape(name), generator=draw, dtype=torch.float64)
        for name in (*given, *graph.given_gradients)
    }


@pytest.mark.parametrize(
    ("device_type", "dtype", "expected"),
    [
        ("cpu", "float64", {"torch_flash_attention"}),
        ("cuda", "float64", set()),
        ("cuda", "bfloat16", {"cuda_flash_attention", "cudnn_attention", "triton_attention"}),
    ],
)
def test_attention_as_one_takes_heads_that_share_a_key(
    model: Model, device_type: str, dtype: str, expected: set[str]
) -> None:
    wide = replace(model, extents={**model.extents, "p": 16}, dtype=dtype)
    space = build_space(training_graph(wide.graph()), space_file(device_type))
    kernels = {choice.candidate.kernel for choice in space.choices}
    assert "torch_softmax" in kernels
    assert {kernel for kernel in kernels if "attention" in kernel} == {
        *expected,
        *(f"{name}_grad" for name in expected),
    }


def test_attention_as_one_of_heads_that_share_a_key_equals_the_reference(model: Model) -> None:
    space = build_space(training_graph(model.graph()), space_file("cpu"))
    found = [call for call in space.calls.values() if "flash" in call.candidate.kernel]
    assert len(found) > 3
    assert faults(found) == {}


def test_grouped_query_attention_is_tuned_and_trains_as_autograd_does(model: Model, tmp_path: Path) -> None:
    """With made-up times; the training step runs for real."""
    file = load_space(without_compilers(tmp_path))
    calls = build_space(training_graph(model.graph()), file).calls
    with open_database(tmp_path / "tuned.sqlite") as database:
        configuration = tune(
            model, file, database, Asking(times(calls)), policy=TuningPolicy(explaining_s=0.1), exhaustive=True
        )
    known = values(model)
    step = TrainingStep(configuration, known)
    found = {"y": step.forward(known["x"]).clone()} | step.backward(known["grad_y"])
    expected = autograd(known)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10)
