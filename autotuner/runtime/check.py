"""A configuration against the framework: forward and every gradient, in float64.

Without dropout the reference is nn.TransformerEncoderLayer itself. With dropout it is the training graph, operator by
operator, with the masks that the tuned forward drew; that the graph equals the framework is shown without dropout.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from autotuner.errors import InputError
from autotuner.ir.device import CUDA
from autotuner.ir.form import Form
from autotuner.ir.kinds import draws
from autotuner.ir.records import TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.reference import evaluate
from autotuner.kernels.torch.masks import decoded
from autotuner.measure.devices import device_of
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import Port
from autotuner.runtime.adapters import adapter_for
from autotuner.runtime.drop_in import apply
from autotuner.runtime.framework import MadeUpCall, encoder_layer
from autotuner.runtime.function import workspace_of
from autotuner.runtime.module import TunedModule
from autotuner.runtime.workspace import Workspace

# Largest error of a whole layer, forward or backward, as a share of the tensor's largest element. A layer is a chain of
# about ten roundings per element; sums run over up to 4096 terms of random sign, whose error grows with the root of
# that. Half types round every intermediate tensor to 2**-8 or 2**-11 of itself.
TOLERANCES = {"float64": 1e-12, "float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}
SIGMAS = 6.0
SEED_MAX = 2**63 - 1
# On CUDA, so many steps come before the one that is compared: then it is a replay, with graphs that were captured.
STEPS_BEFORE = 2
# A generator that compares 16 random bits with p meets it to half a step.
MASK_RESOLUTION = 2.0**-17


@dataclass(frozen=True)
class Kept:
    """The share of elements that a drawn mask keeps, the one that was asked for, and how far apart chance lets them."""

    share: float
    expected: float
    allowed: float

    @property
    def ok(self) -> bool:
        return abs(self.share - self.expected) <= self.allowed


@dataclass(frozen=True)
class CheckReport:
    """Largest errors by tensor, as a share of its largest element, and what the dropout masks keep.

    `fallbacks` counts calls that ran the framework instead, of which a check must have none.
    """

    errors: Mapping[str, float]
    tolerance: float
    masks: Mapping[str, Kept]
    fallbacks: int

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.errors.items(), key=lambda item: item[1])

    @property
    def ok(self) -> bool:
        """True where every error is within the tolerance (a NaN is not) and every mask plausible."""
        within = all(error <= self.tolerance for error in self.errors.values())
        return within and not self.fallbacks and all(mask.ok for mask in self.masks.values())


@dataclass(frozen=True)
class CheckedStep:
    """Output "y", gradient "x" and those of all parameters of a tuned training step, and the same in float64."""

    found: Mapping[str, Tensor | None]
    wanted: Mapping[str, Tensor]
    masks: Mapping[str, Kept]
    fallbacks: int

    def report(self, dtype: str) -> CheckReport:
        errors = {name: _error(self.found[name], wanted) for name, wanted in self.wanted.items()}
        return CheckReport(errors, TOLERANCES[dtype], self.masks, self.fallbacks)


def check(configuration: Configuration, seed: int = 0) -> CheckReport:
    """Run one training step tuned and one as reference, from the same values, and compare.

    Both run on the configuration's device; on CUDA the tuned one is a replay of its graphs.

    Args:
        seed: of inputs, parameters and masks, from 0 to `SEED_MAX`.

    Raises:
        InputError: there is no such seed.
        ConfigurationError: the framework has no layer for the configuration's model.
        DeviceError: the configuration's device is not here.
    """
    return compare(configuration, seed).report(configuration.model.dtype)


def compare(configuration: Configuration, seed: int = 0) -> CheckedStep:
    """Return what both training steps of `check` compute; raises as it does."""
    if not 0 <= seed <= SEED_MAX:
        raise InputError(f"the seed is {seed}: give a number from 0 to {SEED_MAX}")
    device_of(str(configuration.environment["device_type"]), 0)
    model, device = configuration.model, str(configuration.environment["device_type"])
    layer, call = encoder_layer(model, seed, device), MadeUpCall.of(model, seed, device)
    wide = copy.deepcopy(layer).double()
    tuned = apply(layer, configuration)
    assert isinstance(tuned, TunedModule)
    on_cuda = device == CUDA
    for _ in range(STEPS_BEFORE if on_cuda else 0):
        torch.autograd.backward(tuned(call.x, **call.masks), call.grad_y)
        for leaf in (call.x, *tuned.parameters()):
            leaf.grad = None
    with torch.random.fork_rng([torch.cuda.current_device()] if on_cuda else [], device_type=CUDA):
        torch.manual_seed(seed)
        y: Tensor = tuned(call.x, **call.masks)
    masks = drawn_masks(y, configuration) if tuned.calls else {}
    torch.autograd.backward(y, call.grad_y)
    found = {"y": y, "x": call.x.grad} | {name: p.grad for name, p in tuned.named_parameters()}
    if masks:
        graph = configuration.graph()
        drop = {o.outputs[0]: float(o.attribute("p")) for o in graph.operators if draws(o.kind)}
        drawing = {name: KERNELS[step.kernel] for step in configuration.steps for name in step.operators}
        by = {o.outputs[0]: drawing[o.name] for o in graph.operators if draws(o.kind)}
        kept = {name: _kept(mask, by[name].drops(drop[name])) for name, mask in masks.items()}
        scaled = {n: m.double() / (1 - drop[n]) if m.dtype == torch.bool else m.double() for n, m in masks.items()}
        wanted = graph_reference(configuration, wide, call, scaled)
    else:
        kept, wanted = {}, framework_reference(wide, call)
    return CheckedStep(found, wanted, kept, sum(tuned.fallbacks.values()))


def drawn_masks(y: Tensor, configuration: Configuration) -> dict[str, Tensor]:
    """Return copies of the dropout masks that backward reads of the forward of a tuned module's output, by name: as
    stored, those that are stored as bits or as a seed as booleans."""
    return masks_in(workspace_of(y), configuration)


def masks_in(workspace: Workspace, configuration: Configuration) -> dict[str, Tensor]:
    """Return the same of the last forward in a workspace."""
    graph = configuration.graph()
    drawn = {o.outputs[0]: float(o.attribute("p")) for o in graph.operators if draws(o.kind)}
    steps = workspace.plan.steps
    made = {place for step in steps if step.phase == "forward" for place in step.outputs if place is not None}
    kept = made & {place for step in steps if step.phase == "backward" for place in step.inputs}
    found = {}
    for name, text in kept:
        if name in drawn:
            tensor = graph.tensors[name]
            lies = workspace.views[name, text].clone()
            values = TensorType(graph.shape(name), tensor.dtype)
            form = Form.parse(text).renamed(tensor.axes, values.axes)
            found[name] = decoded(lies, form, values, drawn[name])
    return found


def framework_reference(wide: nn.Module, call: MadeUpCall) -> dict[str, Tensor]:
    """Return output and gradients of a float64 module, by parameter name, "x" and "y"."""
    x = call.x.detach().double().requires_grad_()
    y = wide(x, **call.masks)
    torch.autograd.backward(y, call.grad_y.double())
    gradients = {name: p.grad for name, p in wide.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad} | gradients


def graph_reference(
    configuration: Configuration, wide: nn.Module, call: MadeUpCall, masks: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the same from the training graph in float64, with given dropout masks that carry their scale."""
    graph = configuration.graph()
    known: dict[str, Tensor] = {"x": call.x.detach().double(), "grad_y": call.grad_y.double()}
    if call.padding is not None:
        known["attention_mask"] = torch.zeros(
            call.padding.shape, dtype=torch.float64, device=call.padding.device
        ).masked_fill_(call.padding, -torch.inf)
    ports = adapter_for(wide).ports
    for port in ports:
        whole = wide.get_parameter(port.name).detach()
        for name, part in zip(port.members, whole.chunk(len(port.members)), strict=True):
            known[name] = part.reshape(graph.shape(name))
    subgraph = graph.subgraph(graph.operators, known, graph.outputs)
    inside = (t for o in graph.operators for t in o.inputs + o.outputs)
    numbers = {name: i for i, name in enumerate(dict.fromkeys((*known, *graph.outputs, *inside)))}
    made = evaluate(subgraph, list(known.values()), {numbers[name]: mask for name, mask in masks.items()})
    found = {name: tensor for name, tensor in zip(graph.outputs, made, strict=True) if tensor is not None}
    gradients = {port.name: _joined(port, found, wide) for port in ports}
    return {"y": found["y"], "x": found["grad_x"]} | gradients


def _joined(port: Port, found: Mapping[str, Tensor], wide: nn.Module) -> Tensor:
    return torch.cat([found[f"grad_{name}"].reshape(-1) for name in port.members]).view_as(
        wide.get_parameter(port.name)
    )


def _error(found: Tensor | None, wanted: Tensor) -> float:
    if found is None:
        return float("inf")
    return float((found.detach().double() - wanted).abs().max() / wanted.abs().max())


def _kept(mask: Tensor, dropped: float) -> Kept:
    chance = SIGMAS * sqrt(dropped * (1 - dropped) / mask.numel())
    return Kept(float((mask != 0).double().mean()), 1 - dropped, chance + MASK_RESOLUTION)
