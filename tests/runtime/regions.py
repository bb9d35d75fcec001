"""Tuned regions, and the same computation in float64."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.kinds import draws
from autotuner.ir.models import Model
from autotuner.ir.models.model import ModelFile
from autotuner.ir.models.schema import parse_definition
from autotuner.kernels.reference import evaluate
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import Port
from autotuner.runtime.check import masks_in
from autotuner.runtime.region import TunedRegion
from autotuner.runtime.region_plan import RegionPorts
from autotuner.runtime.saved_state import LEASES

EXTENTS = {"b": 2, "l": 6, "h": 8, "n": 2, "p": 4}

SHARED = {
    "version": 1,
    "name": "shared-key-attention",
    "dtype": "float64",
    "axes": {"b": "batch", "l": "position", "h": "hidden", "n": "head", "p": "feature"},
    "inputs": {"x": {"axes": "blh"}, "added": {"axes": "bl"}},
    "parameters": {"weight": "nph", "bias": "np"},
    "operators": [
        {"name": "halved", "kind": "scale", "spec": "blh->blh", "inputs": ["x"], "outputs": ["halved"],
         "attributes": {"factor": 0.5}},
        {"name": "query", "kind": "contraction", "spec": "blh,nph->blnp", "inputs": ["halved", "weight"],
         "outputs": ["query"]},
        {"name": "unbiased", "kind": "contraction", "spec": "blh,nph->blnp", "inputs": ["x", "weight"],
         "outputs": ["unbiased"]},
        {"name": "key", "kind": "bias", "spec": "blnp,np->blnp", "inputs": ["unbiased", "bias"], "outputs": ["key"]},
        {"name": "scores", "kind": "contraction", "spec": "bqnp,bknp->bnqk", "inputs": ["query", "key"],
         "outputs": ["scores"]},
        {"name": "masked", "kind": "mask", "spec": "bnqk,bk->bnqk", "inputs": ["scores", "added"],
         "outputs": ["masked"]},
        {"name": "attention", "kind": "softmax", "spec": "bnqk->bnqk,bnq", "inputs": ["masked"],
         "outputs": ["attention", "logsumexp"], "attributes": {"axis": "k"}},
        {"name": "context", "kind": "contraction", "spec": "bnqk,bknp->bqnp", "inputs": ["attention", "key"],
         "outputs": ["context"]},
    ],
    "outputs": ["context", "key"],
}  # fmt: skip
"""Attention whose query and key have one weight: two inputs, one of them a mask, and two outputs, one of them read
inside as well."""

SIBLINGS = {
    "version": 1,
    "name": "siblings",
    "dtype": "float64",
    "axes": SHARED["axes"],
    "inputs": {"x": {"axes": "blh"}},
    "parameters": dict.fromkeys(("query_weight", "key_weight", "value_weight"), "nph"),
    "operators": [
        {"name": name, "kind": "contraction", "spec": "blh,nph->npbl", "inputs": ["x", f"{name}_weight"],
         "outputs": [name]}
        for name in ("query", "key", "value")
    ],
    "outputs": ["query", "key", "value"],
}  # fmt: skip
"""Three products with one input, which one kernel computes into one buffer."""


def siblings_model() -> Model:
    return ModelFile("test", parse_definition(SIBLINGS, "test")).instantiate(extents=EXTENTS, dtype="float64")


def shared_model() -> Model:
    return ModelFile("test", parse_definition(SHARED, "test")).instantiate(extents=EXTENTS, dtype="float64")


def shared_ports() -> RegionPorts:
    """Return ports of which some have other dimensions than the model's tensors have axes."""
    return RegionPorts(
        inputs=(Port("arg0", ("added",), ("b", "l")), Port("arg1", ("x",), ("l", "b", "h"))),
        parameters=(Port("bias", ("bias",), ("np",)), Port("weight", ("weight",), ("np", "h"))),
        outputs=(Port("context", ("context",), ("b", "n", "q", "p")), Port("key", ("key",), ("b", "l", "np"))),
    )


def shared(inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return what a region of `shared_model` computes, in plain torch."""
    (added, x), (bias, weight) = inputs, parameters
    x = x.transpose(0, 1)
    query = (0.5 * x @ weight.T).view(2, 6, 2, 4)
    key = (x @ weight.T + bias).view(2, 6, 2, 4)
    scores = torch.einsum("bqnp,bknp->bnqk", query, key) + added[:, None, None]
    return [torch.einsum("bnqk,bknp->bnqp", scores.softmax(-1), key), key.flatten(-2)]


def shared_operands(seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Return inputs and parameters of a region of `shared_model`; the mask is a constant."""
    generator = torch.Generator().manual_seed(seed)
    added = torch.zeros(2, 6, dtype=torch.float64)
    added[0, 4:] = -torch.inf
    x, bias, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((6, 2, 8), (8,), (8, 8))
    )
    return [added, x], [bias, weight]


def declared_ports(of: Model) -> RegionPorts:
    """Return the ports of a model's tensors as they are declared."""
    graph = of.graph()

    def port(name: str) -> Port:
        return Port(name, (name,), tuple(graph.tensors[name].axes))

    inputs, parameters = (
        tuple(port(name) for name, tensor in graph.tensors.items() if tensor.role == role)
        for role in ("input", "parameter")
    )
    return RegionPorts(inputs, parameters, tuple(port(name) for name in graph.outputs))


def operands(of: Model, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Return random inputs and parameters for `declared_ports`, as leaves that want gradients."""
    generator, graph = torch.Generator().manual_seed(seed), of.graph()
    made = (
        [
            torch.randn(graph.shape(name), generator=generator, dtype=torch.float64).requires_grad_()
            for name, tensor in graph.tensors.items() if tensor.role == role
        ]
        for role in ("input", "parameter")
    )  # fmt: skip
    inputs, parameters = made
    return inputs, parameters


def given(outputs: Sequence[Tensor], seed: int = 99) -> list[Tensor]:
    """Return random gradients of outputs."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]


Run = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


def step(run: Run, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the outputs of a training step from no gradients, then the gradients of inputs and parameters."""
    leaves = (*inputs, *parameters)
    for leaf in leaves:
        leaf.grad = None
    outputs = list(run(inputs, parameters))
    torch.autograd.backward(outputs, given(outputs))
    return [*(y.detach() for y in outputs), *(leaf.grad for leaf in leaves)]


def drawn(configuration: Configuration) -> dict[str, Tensor]:
    """Return the masks that the only forward without a backward has drawn, with their scale."""
    (lease,) = LEASES.values()
    p = {o.outputs[0]: float(o.attribute("p")) for o in configuration.graph().operators if draws(o.kind)}
    found = masks_in(lease.workspace, configuration)
    return {n: m.double() / (1 - p[n]) if m.dtype == torch.bool else m.double() for n, m in found.items()}


def reference(
    configuration: Configuration, region: TunedRegion, tensors: Sequence[Tensor], masks: Mapping[str, Tensor]
) -> list[Tensor | None]:
    """Return what `step` should for a region with `declared_ports`, from the training graph and given masks."""
    graph, ports = configuration.graph(), region.plan.ports
    known = {port.name: t.detach() for port, t in zip((*ports.inputs, *ports.parameters), tensors, strict=True)}
    likes = [torch.empty(graph.shape(port.name), dtype=torch.float64) for port in ports.outputs]
    known |= {f"grad_{port.name}": grad for port, grad in zip(ports.outputs, given(likes), strict=True)}
    inside = (t for o in graph.operators for t in o.inputs + o.outputs)
    numbers = {name: i for i, name in enumerate(dict.fromkeys((*known, *graph.outputs, *inside)))}
    made = evaluate(
        graph.subgraph(graph.operators, known, graph.outputs),
        list(known.values()),
        {numbers[name]: mask for name, mask in masks.items()},
    )
    found: dict[str, Any] = dict(zip(graph.outputs, made, strict=True))
    sources = [f"grad_{port.name}" for port in (*ports.inputs, *ports.parameters)]
    return [found.get(name) for name in (*(port.name for port in ports.outputs), *sources)]


def assert_same(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None], tolerance: float = 1e-10) -> None:
    assert [one is None for one in found] == [one is None for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
