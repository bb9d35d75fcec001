"""One training step without a tuned kernel: by the framework's own layer, or by the training graph's operators.

In a float64 layer it is the reference that a configuration is checked against. In the configuration's own type it shows
how far rounding alone takes the framework.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autotuner.kernels.reference import evaluate
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import Port
from autotuner.runtime.adapters import adapter_for
from autotuner.runtime.framework import MadeUpCall


def reference_step(
    configuration: Configuration, layer: nn.Module, call: MadeUpCall, masks: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return output "y", gradient "x" and those of all parameters by name, in the element type of the layer.

    Args:
        masks: dropout masks by name, which carry their scale; where there are some, the graph's operators run, since a
            framework's layer takes none.
    """
    return graph_step(configuration, layer, call, masks) if masks else framework_step(layer, call)


def framework_step(layer: nn.Module, call: MadeUpCall) -> dict[str, Tensor]:
    """Return output and gradients of the framework's layer, in its element type."""
    dtype = next(layer.parameters()).dtype
    x = call.x.detach().to(dtype, copy=True).requires_grad_()
    y = layer(x, **call.masks)
    torch.autograd.backward(y, call.grad_y.to(dtype))
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad} | gradients


def graph_step(
    configuration: Configuration, layer: nn.Module, call: MadeUpCall, masks: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the same from the training graph, with given dropout masks that carry their scale."""
    graph, dtype = configuration.graph(), next(layer.parameters()).dtype
    known: dict[str, Tensor] = {"x": call.x.detach().to(dtype), "grad_y": call.grad_y.to(dtype)}
    if call.padding is not None:
        blank = torch.zeros(call.padding.shape, dtype=dtype, device=call.padding.device)
        known["attention_mask"] = blank.masked_fill_(call.padding, -torch.inf)
    ports = adapter_for(layer).ports
    for port in ports:
        whole = layer.get_parameter(port.name).detach()
        for name, part in zip(port.members, whole.chunk(len(port.members)), strict=True):
            known[name] = part.reshape(graph.shape(name))
    subgraph = graph.subgraph(graph.operators, known, graph.outputs)
    inside = (t for o in graph.operators for t in o.inputs + o.outputs)
    numbers = {name: i for i, name in enumerate(dict.fromkeys((*known, *graph.outputs, *inside)))}
    drawn = {numbers[name]: mask.to(dtype) for name, mask in masks.items()}
    made = evaluate(subgraph, list(known.values()), drawn, rounded=dtype != torch.float64)
    found = {name: tensor for name, tensor in zip(graph.outputs, made, strict=True) if tensor is not None}
    gradients = {port.name: _joined(port, found, layer) for port in ports}
    return {"y": found["y"], "x": found["grad_x"]} | gradients


def _joined(port: Port, found: Mapping[str, Tensor], layer: nn.Module) -> Tensor:
    return torch.cat([found[f"grad_{name}"].reshape(-1) for name in port.members]).view_as(
        layer.get_parameter(port.name)
    )
