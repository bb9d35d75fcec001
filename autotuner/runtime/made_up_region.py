"""A training step of a region of any model, from made-up values: tuned, and by the training graph's operators."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autotuner.errors import ConfigurationError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph
from autotuner.ir.models import Model
from autotuner.ir.programmed import CHOICE
from autotuner.kernels.reference import evaluate
from autotuner.measure.operands import Values
from autotuner.plan.configuration import Configuration
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.model_module import ModelModule
from autotuner.runtime.pool import Lease
from autotuner.runtime.saved_state import LEASES

BIAS_DEVIATION = 0.1


def _drawn(
    graph: Graph, outputs: Sequence[str], device: torch.device, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return made-up inputs of a training graph, and gradients of its forward's outputs, by name."""
    roles = {name: graph.tensors[name].role for name in graph.tensors}
    grads = [f"grad_{name}" for name in outputs]
    inputs = [name for name, role in roles.items() if role == "input" and name not in grads]
    parameters = [name for name, role in roles.items() if role == "parameter"]
    subgraph = graph.subgraph(graph.operators, (*inputs, *grads, *parameters), graph.outputs)
    values = list(Values(subgraph, device=device, seed=seed).inputs.values())
    return dict(zip(inputs, values, strict=False)), dict(zip(grads, values[len(inputs) :], strict=False))


@dataclass(frozen=True)
class MadeUpModelCall:
    """Arguments of one training step of a `ModelModule`, and gradients of its outputs; see `MadeUpCall`.

    Args:
        inputs: in the model's order; those that want a gradient say so.
        grads: in the order of the outputs.
    """

    inputs: Sequence[Tensor]
    grads: Sequence[Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        """Tensors beside parameters that get a gradient."""
        return [each for each in self.inputs if each.requires_grad]

    @property
    def device(self) -> torch.device:
        return self.grads[0].device

    def forward(self, module: nn.Module) -> Tensor:
        """Return the first output of a module."""
        made = module(*self.inputs)
        first: Tensor = made[0] if isinstance(made, tuple) else made
        return first

    def step(self, module: nn.Module) -> None:
        """Run a module's forward, and backward with every gradient."""
        made = module(*self.inputs)
        outputs = made if isinstance(made, tuple) else (made,)
        found = [(y, grad) for y, grad in zip(outputs, self.grads, strict=True) if y.requires_grad]
        torch.autograd.backward([y for y, _ in found], [grad for _, grad in found])

    @classmethod
    def of(cls, model: Model, seed: int = 0, device: str = "cpu") -> "MadeUpModelCall":
        """Return a call with random values."""
        graph = training_graph(model.graph())
        inputs, grads = _drawn(graph, model.graph().outputs, torch.device(device), seed)
        for name, value in inputs.items():
            value.requires_grad_(f"grad_{name}" in graph.outputs)
        return cls(list(inputs.values()), list(grads.values()))


@dataclass(frozen=True)
class MadeUpRegion:
    """A region as a module, with values of inputs and of outputs' gradients, by name in the training graph.

    Args:
        module: its parameters are drawn anew for each seed.
        inputs, grads: on the configuration's device, in the types of its tensors.
    """

    configuration: Configuration
    module: ModelModule
    inputs: Mapping[str, Tensor]
    grads: Mapping[str, Tensor]

    @classmethod
    def of(cls, configuration: Configuration, seed: int) -> "MadeUpRegion":
        """Make values up.

        Raises:
            ConfigurationError: the region has choices, such as a router's, which near ties decide in other ways in
                float64.
        """
        graph, device = configuration.graph(), torch.device(str(configuration.environment["device_type"]))
        chooses = [operator.name for operator in graph.operators if operator.kind == CHOICE]
        if chooses:
            raise ConfigurationError(
                f"{configuration.model.name} makes choices, such as {chooses[0]}: float64 decides near ties in other "
                "ways, so that a comparison with it says nothing"
            )
        with device_runtime(device).forked_random():
            torch.manual_seed(seed)
            module = ModelModule([configuration])
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter), alpha=BIAS_DEVIATION)
        return cls(configuration, module, *_drawn(graph, configuration.model.graph().outputs, device, seed))

    def tuned(
        self, saved: Callable[[Lease], Mapping[str, Tensor]] = lambda _: {}
    ) -> tuple[dict[str, Tensor | None], Mapping[str, Tensor]]:
        """Run forward and backward tuned.

        Args:
            saved: reads what forward has saved for backward, such as dropout masks.

        Returns:
            Outputs and gradients by name, and what was read.

        Raises:
            ConfigurationError: the module ran its operators one by one in place of the region.
        """
        wanted = set(self.configuration.graph().outputs)
        leaves = {n: value.clone().requires_grad_(f"grad_{n}" in wanted) for n, value in self.inputs.items()}
        before = set(LEASES)
        made = self.module(*leaves.values())
        leases = [LEASES[place] for place in set(LEASES) - before]
        if not leases:
            raise ConfigurationError(f"{self.configuration.model.name} did not run tuned: nothing was saved")
        read = saved(leases[0])
        outputs = made if isinstance(made, tuple) else (made,)
        names = self.configuration.model.graph().outputs
        found: dict[str, Tensor | None] = {n: each.detach().clone() for n, each in zip(names, outputs, strict=True)}
        self.module.zero_grad()
        torch.autograd.backward(outputs, list(self.grads.values()))
        found |= {f"grad_{name}": leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}
        found |= {f"grad_{name}": p.grad for name, p in self.module.named_parameters() if f"grad_{name}" in wanted}
        return found, read

    def reference(self, masks: Mapping[str, Tensor], wide: bool) -> dict[str, Tensor]:
        """Return the same from the operators of the training graph, in float64 or in the types of its tensors.

        Args:
            masks: dropout masks by name, which carry their scale.
        """
        graph = self.configuration.graph()
        known = {**self.inputs, **self.grads, **{n: p.detach() for n, p in self.module.named_parameters()}}
        inside = (t for o in graph.operators for t in o.inputs + o.outputs)
        numbers = {name: i for i, name in enumerate(dict.fromkeys((*known, *graph.outputs, *inside)))}
        subgraph = graph.subgraph(graph.operators, tuple(known), graph.outputs)
        given = {numbers[name]: mask if wide else mask.float() for name, mask in masks.items()}
        operands = [value.double() if wide and value.is_floating_point() else value for value in known.values()]
        made = evaluate(subgraph, operands, given, rounded=not wide)
        return {name: tensor for name, tensor in zip(graph.outputs, made, strict=True) if tensor is not None}
