"""A configuration against a reference: forward and every gradient, in float64.

Of an encoder layer without dropout, the reference is nn.TransformerEncoderLayer itself. With dropout, and of regions of
other models, it is the training graph, operator by operator, with the masks that the tuned forward drew. That the graph
equals the framework is shown without dropout; a region's graph is what was captured of the user's module.

Every tensor has a fixed tolerance. Where one exceeds it, the framework's own error in the configuration's type says how
much more rounding explains.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt

import torch
from torch import Tensor

from autotuner.errors import InputError
from autotuner.ir.form import Form
from autotuner.ir.kinds import draws
from autotuner.ir.numerics import CLASSES, Numerics
from autotuner.ir.records import TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.torch.formats import decoded
from autotuner.measure.devices import device_of
from autotuner.plan.configuration import Configuration
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.drop_in import apply
from autotuner.runtime.framework import MadeUpCall, encoder_layer
from autotuner.runtime.made_up_region import MadeUpRegion
from autotuner.runtime.module import TunedModule
from autotuner.runtime.reference_step import reference_step
from autotuner.runtime.saved_state import workspace_of
from autotuner.runtime.workspace import Workspace

# Largest error of a whole layer, forward or backward, as a share of the tensor's largest element. A layer is a chain of
# about ten roundings per element; sums run over up to 4096 terms of random sign, whose error grows with the root of
# that. Half types round every intermediate tensor to 2**-8 or 2**-11 of itself.
TOLERANCES = {"float64": 1e-12, "float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}
# What the framework's own layer does in the same type is allowed OWN_FACTOR times over: near zero, a rounded number may
# have another sign than the one in float64, and a ReLU lets the gradient of one pass and not of the other. In a small
# layer that is rare, so that up to OWN_STEPS steps with different values show it.
OWN_FACTOR = 2.0
OWN_STEPS = 4
WIDE = "float64"
LEAST_SHARE = 1e-2
SIGMAS = 6.0
SEED_MAX = 2**63 - 1
# Where a device has graphs, so many steps come before the one that is compared, which then is a replay.
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
class Deviation:
    """Distance of two tensors: the largest, as a share of the largest element, and the root mean square, as a share of
    the elements' root mean square."""

    largest: float
    mean: float

    @classmethod
    def of(cls, found: Tensor | None, wanted: Tensor, least: float = 0.0) -> "Deviation":
        """Compare two tensors; `least` stands for the largest element where that is smaller."""
        if found is None:
            return cls(inf, inf)
        apart = found.detach().double() - wanted
        largest, mean = max(float(wanted.abs().max()), least), max(float(wanted.norm()), least * sqrt(wanted.numel()))
        return cls(float(apart.abs().max()) / largest, float(apart.norm()) / mean)


@dataclass(frozen=True)
class OwnBound:
    """The errors allowed of a tensor beyond the tolerance, because the framework's own layer in this type errs as well.

    One element with another sign before a ReLU moves the largest error far, and the mean hardly. A kernel that is wrong
    throughout moves both, so that both are bounded.

    Args:
        found: of the tuned step.
        own: the largest of the framework's steps.
        allowed: twice that, or the tolerance where that is more.
        numerics: the class of the plan that explains it instead, as "8-bit": its tolerance is allowed, and `own` is 0.
    """

    found: Deviation
    own: Deviation
    allowed: Deviation
    numerics: Numerics = "exact"

    @property
    def ok(self) -> bool:
        return self.found.largest <= self.allowed.largest and self.found.mean <= self.allowed.mean


@dataclass(frozen=True)
class CheckReport:
    """Largest errors by tensor, as a share of its largest element, and what the dropout masks keep.

    Args:
        tolerance: of every tensor, by the element type.
        masks: by name.
        fallbacks: calls that ran the framework instead, of which a check must have none.
        own_bounds: of the tensors beyond the tolerance, by what the framework itself does.
    """

    errors: Mapping[str, float]
    tolerance: float
    masks: Mapping[str, Kept]
    fallbacks: int
    own_bounds: Mapping[str, OwnBound] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.errors.items(), key=lambda item: item[1])

    @property
    def ok(self) -> bool:
        """True where every error is allowed (a NaN is not) and every mask plausible."""
        within = all(map(self.allows, self.errors))
        return within and not self.fallbacks and all(mask.ok for mask in self.masks.values())

    @property
    def allowed(self) -> dict[str, float]:
        """The largest error that each tensor may have."""
        bounds = self.own_bounds
        return {n: bounds[n].allowed.largest if n in bounds else self.tolerance for n in self.errors}

    @property
    def reasons(self) -> list[str]:
        """Reasons why a tensor beyond the tolerance is right or wrong, in words: one sentence each."""
        return [_reason(name, bound, self.tolerance) for name, bound in self.own_bounds.items()]

    def allows(self, name: str) -> bool:
        """Say whether a tensor's error is within the tolerance, or else within twice the framework's own."""
        return self.errors[name] <= self.tolerance or (name in self.own_bounds and self.own_bounds[name].ok)


Reference = Callable[[int, Mapping[str, Tensor], bool], Mapping[str, Tensor]]
"""Makes a step's outputs and gradients from a seed and scaled dropout masks, in float64 or else as the framework."""


@dataclass(frozen=True)
class CheckedStep:
    """Outputs and gradients of a tuned training step, and the same in float64.

    Of an encoder layer they are output "y", gradient "x" and those of parameters by name; of a region they have the
    names of the training graph.

    Args:
        seed: of inputs and parameters.
        drawn: the dropout masks of the tuned step, as stored; those of bits or of a seed as booleans.
        reference: makes the same with the values of another seed, in float64 or as the framework does.
        least_share: of the largest gradient. Elements of one whose largest is smaller are compared with that: the
            gradient of a key's bias, say, is 0 up to rounding.
    """

    configuration: Configuration
    seed: int
    found: Mapping[str, Tensor | None]
    wanted: Mapping[str, Tensor]
    drawn: Mapping[str, Tensor]
    fallbacks: int
    reference: Reference
    least_share: float = 0.0

    def report(self) -> CheckReport:
        """Compare the two. Where a tensor is beyond the tolerance, steps of the framework in the configuration's type
        say what is allowed."""
        tolerance, found = self.tolerance, self._deviations(self.found, self.wanted)
        beyond = {name: each for name, each in found.items() if not each.largest <= tolerance}
        lost = any(not isfinite(each.largest) for each in beyond.values())
        bounds = self._class_bounds(beyond)
        beyond = {name: each for name, each in beyond.items() if name not in bounds}
        if beyond and not lost and tolerance != TOLERANCES[WIDE]:
            bounds |= self._own_bounds(beyond)
        errors = {name: each.largest for name, each in found.items()}
        return CheckReport(errors, tolerance, _kept(self.configuration, self.drawn), self.fallbacks, bounds)

    @property
    def tolerance(self) -> float:
        """That of the narrowest type in the step: under autocast, not the one of its inputs."""
        dtypes = {tensor.dtype for tensor in self.configuration.graph().tensors.values()}
        return max(TOLERANCES[dtype] for dtype in {self.configuration.model.dtype, *dtypes} if dtype in TOLERANCES)

    def _deviations(self, found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor]) -> dict[str, Deviation]:
        gradients = [float(values.abs().max()) for name, values in wanted.items() if name.startswith("grad_")]
        least = self.least_share * max(gradients, default=0.0)
        return {
            name: Deviation.of(found[name], values, least if name.startswith("grad_") else 0.0)
            for name, values in wanted.items()
        }

    def _class_bounds(self, beyond: Mapping[str, Deviation]) -> dict[str, OwnBound]:
        """Return what the numerics classes of the plan allow; nothing where it is exact."""
        none, made = Deviation(0.0, 0.0), self.configuration.model.graph().outputs
        bounds: dict[str, OwnBound] = {}
        for declared in (CLASSES[numerics] for numerics in self.configuration.inexact):
            allowed = Deviation(declared.tolerance, declared.tolerance)
            bounds |= {
                name: OwnBound(found, none, allowed, declared.name)
                for name, found in beyond.items() if declared.outputs_differ or name not in made
            }  # fmt: skip
        return bounds

    def _own_bounds(self, beyond: Mapping[str, Deviation]) -> dict[str, OwnBound]:
        """Return what the framework's own errors allow, from as many of its steps as are needed, or some."""
        tolerance = self.tolerance
        own, bounds = dict.fromkeys(beyond, Deviation(0.0, 0.0)), {}
        for number in range(OWN_STEPS):
            made = self.own_errors((self.seed + number) % (SEED_MAX + 1), None if number else self.wanted)
            for name, found in beyond.items():
                most = Deviation(max(own[name].largest, made[name].largest), max(own[name].mean, made[name].mean))
                allowed = Deviation(max(tolerance, OWN_FACTOR * most.largest), max(tolerance, OWN_FACTOR * most.mean))
                own[name], bounds[name] = most, OwnBound(found, most, allowed)
            if all(bound.ok for bound in bounds.values()):
                break
        return bounds

    def own_errors(self, seed: int, wanted: Mapping[str, Tensor] | None) -> dict[str, Deviation]:
        """Return the errors of a step by the framework in the configuration's type, with the masks of the tuned one."""
        masks = _scaled(self.configuration, self.drawn)
        wide = self.reference(seed, masks, True) if wanted is None else wanted
        made = self.reference(seed, masks, False)
        return self._deviations(made, wide)


def check(configuration: Configuration, seed: int = 0) -> CheckReport:
    """Run one training step tuned and one as reference, from the same values, and compare.

    Both run on the configuration's device; where that has graphs, the tuned one is a replay of them.

    Args:
        seed: of inputs, parameters and masks, from 0 to `SEED_MAX`.

    Raises:
        InputError: there is no such seed.
        ConfigurationError: a region makes choices, as routers do.
        DeviceError: the configuration's device is not here.
    """
    return compare(configuration, seed).report()


def compare(configuration: Configuration, seed: int = 0) -> CheckedStep:
    """Return what both training steps of `check` compute; raises as it does."""
    if not 0 <= seed <= SEED_MAX:
        raise InputError(f"the seed is {seed}: give a number from 0 to {SEED_MAX}")
    device_of(str(configuration.environment["device_type"]), 0)
    compared = _compared_layer if configuration.model.has_framework_layer else _compared_region
    return compared(configuration, seed)


def _compared_layer(configuration: Configuration, seed: int) -> CheckedStep:
    model, device = configuration.model, str(configuration.environment["device_type"])
    layer, call = encoder_layer(model, seed, device), MadeUpCall.of(model, seed, device)
    tuned = apply(layer, configuration)
    assert isinstance(tuned, TunedModule)
    for _ in range(_steps_before(device)):
        torch.autograd.backward(tuned(call.x, **call.masks), call.grad_y)
        for leaf in (call.x, *tuned.parameters()):
            leaf.grad = None
    with _seeded(device, seed):
        y: Tensor = tuned(call.x, **call.masks)
    masks = drawn_masks(y, configuration) if tuned.calls else {}
    torch.autograd.backward(y, call.grad_y)
    found = {"y": y, "x": call.x.grad} | {name: p.grad for name, p in tuned.named_parameters()}

    def reference(seed: int, masks: Mapping[str, Tensor], wide: bool) -> Mapping[str, Tensor]:
        layer, call = encoder_layer(model, seed, device), MadeUpCall.of(model, seed, device)
        return reference_step(configuration, layer.double() if wide else layer, call, masks)

    wanted = reference(seed, _scaled(configuration, masks), True)
    return CheckedStep(configuration, seed, found, wanted, masks, sum(tuned.fallbacks.values()), reference)


def _compared_region(configuration: Configuration, seed: int) -> CheckedStep:
    device = str(configuration.environment["device_type"])
    region = MadeUpRegion.of(configuration, seed)
    for _ in range(_steps_before(device)):
        region.tuned()
    with _seeded(device, seed):
        found, masks = region.tuned(lambda lease: masks_in(lease.workspace, configuration))
    wanted = region.reference(_scaled(configuration, masks), True)

    def reference(of: int, masks: Mapping[str, Tensor], wide: bool) -> Mapping[str, Tensor]:
        return (region if of == seed else MadeUpRegion.of(configuration, of)).reference(masks, wide)

    return CheckedStep(configuration, seed, found, wanted, masks, 0, reference, LEAST_SHARE)


def _steps_before(device: str) -> int:
    return STEPS_BEFORE if device_runtime(torch.device(device)).has_graphs else 0


@contextmanager
def _seeded(device: str, seed: int) -> Iterator[None]:
    with device_runtime(torch.device(device)).forked_random():
        torch.manual_seed(seed)
        yield


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
            lies = workspace.steps.views[name, text].clone()
            values = TensorType(graph.shape(name), tensor.dtype)
            form = Form.parse(text).renamed(tensor.axes, values.axes)
            found[name] = decoded(lies, form, values, drawn[name])
    return found


def _scaled(configuration: Configuration, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return dropout masks in float64, with their scale."""
    drop = _dropped(configuration)
    return {n: m.double() / (1 - drop[n]) if m.dtype == torch.bool else m.double() for n, m in masks.items()}


def _dropped(configuration: Configuration) -> dict[str, float]:
    """Return what share is to be dropped, by mask."""
    return {o.outputs[0]: float(o.attribute("p")) for o in configuration.graph().operators if draws(o.kind)}


def _kept(configuration: Configuration, masks: Mapping[str, Tensor]) -> dict[str, Kept]:
    """Return what masks keep, and what they should: the kernels that draw them round the share that is asked for."""
    drawing = {name: KERNELS[step.kernel] for step in configuration.steps for name in step.operators}
    by = {o.outputs[0]: drawing[o.name] for o in configuration.graph().operators if draws(o.kind)}
    drop = _dropped(configuration)
    return {name: _share(mask, by[name].drops(drop[name])) for name, mask in masks.items()}


def _share(mask: Tensor, dropped: float) -> Kept:
    chance = SIGMAS * sqrt(dropped * (1 - dropped) / mask.numel())
    return Kept(float((mask != 0).double().mean()), 1 - dropped, chance + MASK_RESOLUTION)


def _reason(name: str, bound: OwnBound, tolerance: float) -> str:
    found, own, allowed = bound.found, bound.own, bound.allowed
    verdict = "so that it is right" if bound.ok else "so that it is wrong"
    if bound.numerics != "exact":
        return (
            f"{name} is off by {found.largest:.1e}, root mean square {found.mean:.1e}, where {tolerance:.1e} is "
            f"allowed; the plan {CLASSES[bound.numerics].checked} may be off by {allowed.largest:.1e} in both, "
            f"{verdict}"
        )
    return (
        f"{name} is off by {found.largest:.1e} where {tolerance:.1e} is allowed; the framework's own layer in this "
        f"type is off by {own.largest:.1e}, and twice that is allowed ({allowed.largest:.1e}). Root mean squares: "
        f"{found.mean:.1e}, the framework's {own.mean:.1e}, allowed {allowed.mean:.1e}, {verdict}"
    )
