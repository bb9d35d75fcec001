"""A configuration bound to one module: a region that runs it, and what a call must be like."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from autotuner.errors import ConfigurationError
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import Port
from autotuner.runtime.adapter import SETTINGS, Adapter, check_fit, dims_of, dtype_name
from autotuner.runtime.fallbacks import Reason
from autotuner.runtime.graphs import Switch
from autotuner.runtime.masks import additive_key_mask
from autotuner.runtime.pool import Pool
from autotuner.runtime.region import TunedRegion, is_captured
from autotuner.runtime.region_plan import RegionPorts

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PLAIN = (nn.Parameter, Tensor)
HOOKED = Reason("hooks", "a submodule has hooks, which only the original calls")


class Binding:
    """Made for one module; checks every call, which must cost microseconds.

    Attributes:
        region: runs the configuration.
        masked: whether that has a mask over keys.
        results, masked_results: what the compiler is told of a call without a mask, and of one with a mask.
    """

    def __init__(
        self,
        module: nn.Module,
        adapter: Adapter,
        configurations: Sequence[Configuration],
        shapes: Sequence[torch.Size],
        place: int,
        graphs: Switch,
    ) -> None:
        """Bind one of several configurations, each for inputs of its own shape.

        Args:
            place: of the configuration, and of its shape.
            graphs: whether calls become CUDA graphs, for all configurations of the module.
        """
        self._adapter = adapter
        self._first, self._shapes = configurations[0], shapes
        configuration = configurations[place]
        model = configuration.model
        dims = dims_of(adapter, module)
        self._ports = adapter.ports
        self.masked = bool(model.options.get("attention_mask"))
        masks = (Port("attention_mask", ("attention_mask",), ("b", "l")),) if self.masked else ()
        ports = RegionPorts((Port("x", ("x",), dims), *masks), adapter.ports, (Port("y", ("y",), dims),))
        self.region = TunedRegion(configuration, ports, graphs=graphs, repeats=True, label=f"a tuned {_name(module)}")
        self._shape = shapes[place]
        told = replace(self.region.plan.results, state_bytes=None, unreached=())
        of_x = told.gradients[0]
        self.results, self.masked_results = (
            replace(told, gradients=(of_x, *of_mask)).text() for of_mask in ((), (None,))
        )
        self._keys = (model.extents["b"], model.extents["l"])
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self._device = torch.device(str(configuration.environment["device_type"]))
        self._settings = tuple(float(model.options[name]) for name in SETTINGS)
        self._look_at_parts(module)
        self._no_mask: Tensor | None = None
        problem = self.rebind(self.current())
        if problem is not None:
            raise ConfigurationError(problem.sentence)

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def pool(self) -> Pool:
        """Workspaces over the parameters of the last call."""
        return self.region.bound.last.pool

    def uncovered(self, module: nn.Module, x: Tensor) -> Reason | None:
        """Say why a call with this input is not covered, whatever its mask and parameters, or None if it is."""
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            return Reason("tensor", f"the input is a {type(x).__name__}, no plain tensor")
        if x.is_nested or x.shape != self._shape:
            given = "nested" if x.is_nested else str(tuple(x.shape))
            shapes = " and ".join(str(tuple(shape)) for shape in dict.fromkeys(self._shapes))
            return Reason("shape", f"the input's shape is {given}, and it was tuned for {shapes}")
        if x.device != self._device:
            self._follow(x.device)
        if x.dtype is not self._dtype or x.device != self._device:
            self._let_go_of_what_left()
            return Reason(
                "dtype", f"the input is {x.dtype} on {x.device}, and it was tuned for {self._dtype} on {self._device}"
            )
        if torch.is_autocast_enabled(self._device.type):
            return Reason("autocast", "autocast is on, and it was tuned for one dtype")
        if self._adapter.parts(module) != self._parts:
            problem = self._replaced(module)
            if problem is not None:
                return problem
        if self._adapter.settings(self._parts) != self._settings:
            return self._other_settings(module)
        if any(self._hooks) or _has_any_global_hook():  # type: ignore[no-untyped-call]
            return HOOKED
        for attributes in self._attributes:
            if "forward" in attributes:
                return Reason("forward", "the forward of a submodule was replaced, and only the original calls it")
        if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
            return Reason("tracing", "torch is tracing or transforming the call")
        if forward_ad._current_level >= 0:
            return Reason("forward_ad", "forward-mode differentiation is on")
        return None

    def mask_for(self, module: object, mask: Tensor | None, keeps: bool) -> Tensor | Reason | None:
        """Return the additive mask over keys that the plan takes for a framework's mask; see `masks`."""
        if mask is None:
            return None
        if mask.device != self._device:
            return Reason("mask", f"the mask is on {mask.device}, and the module's parameters on {self._device}")
        return additive_key_mask(mask, self._keys, self._dtype if self.masked else None, keeps=keeps, asker=module)

    def inputs(self, x: Tensor, added: Tensor | None) -> list[Tensor]:
        """Return the region's inputs: x, and a mask that adds nothing where the plan has one and the call has none."""
        if not self.masked:
            return [x]
        if added is not None:
            return [x, added]
        if is_captured(x.device):  # its memory is the graph's, and is filled by replays alone
            return [x, torch.zeros(self._keys, dtype=self._dtype, device=x.device)]
        if self._no_mask is None or self._no_mask.device != x.device:
            with torch.inference_mode(False):  # so that a later call can save it for backward
                self._no_mask = torch.zeros(self._keys, dtype=self._dtype, device=x.device)
        return [x, self._no_mask]

    def fits(self, module: nn.Module, x: Tensor) -> bool:
        """Say whether a call would be covered, by what the compiler can guard; `uncovered` has the last word."""
        return (
            x.shape == self._shape
            and x.dtype is self._dtype
            and x.device == self._device
            and not torch.is_autocast_enabled(self._device.type)
            and self._adapter.parts(module) == self._parts
            and self._adapter.settings(self._parts) == self._settings
            and not any(self._hooks)
        )

    def current(self) -> list[Tensor]:
        """Return the module's parameters, in the order of the ports; what is missing is None.

        FSDP keeps views of its flat parameter as plain attributes while a forward runs.
        """
        found = []
        for parameters, attributes, name in self._slots:
            tensor = parameters.get(name)
            found.append(attributes.get(name) if tensor is None else tensor)
        return found  # type: ignore[return-value]

    def _follow(self, device: torch.device) -> None:
        """Bind anew where the module was moved to another device of the kind that it was tuned for."""
        current = self.current()
        if device.type == self._device.type and current[0] is not None and current[0].device == device:
            self.rebind(current)

    def _look_at_parts(self, module: nn.Module) -> None:
        self._parts: Any = self._adapter.parts(module)
        modules = [part for part in self._parts if isinstance(part, nn.Module)]
        self._hooks = [getattr(part, name) for part in modules for name in HOOKS]
        self._attributes = [part.__dict__ for part in modules]
        self._slots: list[tuple[Mapping[str, Any], Mapping[str, Any], str]] = []
        for port in self._ports:
            path, _, name = port.name.rpartition(".")
            owner = module.get_submodule(path)
            self._slots.append((owner._parameters, owner.__dict__, name))

    def _replaced(self, module: nn.Module) -> Reason | None:
        """Look at a module anew after a part of it was replaced; say why it does not fit any more, or None."""
        try:
            check_fit(self._adapter, module, self._first, or_eval=True)
        except (ConfigurationError, AttributeError) as error:
            return Reason("parts", f"a submodule was replaced: {error}")
        self._look_at_parts(module)
        return None

    def _other_settings(self, module: nn.Module) -> Reason:
        found = self._adapter.settings(self._parts)
        name, given, tuned = next(row for row in zip(SETTINGS, found, self._settings, strict=True) if row[1] != row[2])
        mode = "train" if module.training else "eval"
        return Reason("settings", f"{name} is {given} in {mode} mode, and it was tuned for {tuned}")

    def rebind(self, current: Sequence[Tensor]) -> Reason | None:
        """Bind to the memory that the parameters have now; where they do not fit, let go of all memory and say why."""
        problem = self._bound_to(current)
        if problem is not None:
            self._let_go()
        return problem

    def _let_go(self) -> None:
        """Give back workspaces, and the parameters that they were built on; a call that fits builds them anew."""
        self._no_mask = None
        self.region.bound.let_go()

    def _let_go_of_what_left(self) -> None:
        """Let go where the module was moved elsewhere, or converted."""
        first = self.current()[0]
        if first is None or first.dtype is not self._dtype or first.device != self._device:
            self._let_go()

    def _bound_to(self, current: Sequence[Tensor]) -> Reason | None:
        wanted = self._device
        expected = self.region.plan.expected[-len(self._ports) :]
        for port, (_, _, shape), parameter in zip(self._ports, expected, current, strict=True):
            if type(parameter) not in PLAIN:
                return Reason("parameters", f"{port.name} is a {type(parameter).__name__}, no plain parameter")
            if parameter.device.type == wanted.type and port is self._ports[0]:
                wanted = parameter.device  # all others have to be there as well
            if tuple(parameter.shape) != shape or parameter.dtype != self._dtype or parameter.device != wanted:
                return Reason(
                    "parameters",
                    f"{port.name} is {dtype_name(parameter.dtype)} {tuple(parameter.shape)} on {parameter.device}, and "
                    f"it was tuned for {dtype_name(self._dtype)} {shape} on {wanted}",
                )
        self._device = wanted
        self.region.bound.bind(current, wanted)
        return None


def _name(module: nn.Module) -> str:
    kind: type[nn.Module] = getattr(module, "original", type(module))
    return kind.__name__
