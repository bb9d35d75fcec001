"""A configuration bound to one module: its parameters' memory, workspaces over it, and what a call must be like."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from autotuner.errors import ConfigurationError
from autotuner.placement.planning import make_plan
from autotuner.placement.port import Geometry, Port, Ports
from autotuner.runtime.adapters.adapter import SETTINGS, Adapter, dtype_name
from autotuner.runtime.graphs import Switch
from autotuner.runtime.reason import Reason
from autotuner.runtime.workspace import Pool

if TYPE_CHECKING:
    from autotuner.runtime.module import TunedModule

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Binding:
    """Made for one module; checks every call, which must cost microseconds, and follows parameters that move.

    The first of a module's bindings lays its parameters out. Where others want them to lie otherwise, they are copied
    before each forward.
    """

    def __init__(self, module: "TunedModule", place: int, adapter: Adapter, graphs: Switch) -> None:
        self._adapter, self._graphs, self._is_first = adapter, graphs, place == 0
        configuration = module.configurations[place]
        model = configuration.model
        dims = dims_of(adapter, module)
        self._ports = adapter.ports
        self._plan = make_plan(configuration, [port.members for port in adapter.ports if len(port.members) > 1])
        masks = (Port("attention_mask", ("attention_mask",), ("b", "l")),) if model.options["attention_mask"] else ()
        self._boundary = Ports(
            (Port("x", ("x",), dims), *masks),
            (Port("y", ("y",), dims),),
            (Port("y", ("y",), dims),),
            (Port("x", ("x",), dims), *adapter.ports),
        )
        self._lying = [self._plan.geometry(port) for port in adapter.ports]
        self.gradient_strides = list(self._plan.geometry(self._boundary.sources[0], "grad_").strides)
        self._shape = module.shapes[place]
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self._device = torch.device(str(configuration.environment["device_type"]))
        self._settings = tuple(float(model.options[name]) for name in SETTINGS)
        self.repeatable = not any(self._settings[:4])
        self._parts: Any = None
        self._hooks: list[Any] = []
        self._slots: list[tuple[dict[str, Any], str]] = []
        self.parameters: list[nn.Parameter] = []
        self._memory: list[tuple[int, tuple[int, ...]]] = []
        self._look_at_parts(module)
        problem = self._rebind(module)
        if problem is not None:
            raise ConfigurationError(problem.sentence)

    def uncovered(self, module: "TunedModule", x: Tensor, mask: Tensor | Reason | None) -> Reason | None:
        """Say why this call is not covered, or None if it is."""
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            return Reason("tensor", f"the input is a {type(x).__name__}, no plain tensor")
        if x.is_nested or x.shape != self._shape:
            given = "nested" if x.is_nested else str(tuple(x.shape))
            shapes = " and ".join(str(tuple(shape)) for shape in module.shapes)
            return Reason("shape", f"the input's shape is {given}, and it was tuned for {shapes}")
        if x.device != self._device:
            self._follow(module, x.device)
        if x.dtype is not self._dtype or x.device != self._device:
            return Reason(
                "dtype", f"the input is {x.dtype} on {x.device}, and it was tuned for {self._dtype} on {self._device}"
            )
        if mask is not None:
            if isinstance(mask, Reason):
                return mask
            if mask.device != self._device:
                return Reason("mask", f"the mask is on {mask.device}, and the module's parameters on {self._device}")
        if torch.is_autocast_enabled(self._device.type):
            return Reason("autocast", "autocast is on, and it was tuned for one dtype")
        if self._adapter.parts(module) != self._parts:
            problem = self._replaced(module)
            if problem is not None:
                return problem
        if self._adapter.settings(self._parts) != self._settings:
            return self._other_settings(module)
        if any(self._hooks):
            return Reason("hooks", "a submodule has hooks, which only the original calls")
        if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
            return Reason("tracing", "torch is tracing or transforming the call")
        if forward_ad._current_level >= 0:
            return Reason("forward_ad", "forward-mode differentiation is on")
        for (owner, name), parameter, (pointer, strides) in zip(
            self._slots, self.parameters, self._memory, strict=True
        ):
            found = owner.get(name)
            if found is not parameter or parameter.data_ptr() != pointer or parameter.stride() != strides:
                return self._rebind(module)
        return None

    def fits(self, module: nn.Module, x: Tensor, mask: Tensor | None, parameters: Sequence[Tensor]) -> bool:
        """Say whether a call would be covered, by what the compiler can guard; `uncovered` has the last word."""
        return (
            x.shape == self._shape
            and x.dtype is self._dtype
            and x.device == self._device
            and (mask is None or mask.device == self._device)
            and not torch.is_autocast_enabled(self._device.type)
            and self._adapter.parts(module) == self._parts
            and self._adapter.settings(self._parts) == self._settings
            and not any(self._hooks)
            and [parameter.stride() for parameter in parameters] == self._strides
        )

    def owns(self, parameters: Sequence[Tensor]) -> bool:
        """Say whether tensors are the module's parameters, where `uncovered` has found these last."""
        return [(tensor.data_ptr(), tensor.stride()) for tensor in parameters] == self._memory

    def _follow(self, module: "TunedModule", device: torch.device) -> None:
        """Bind anew where the module was moved to another device of the kind that it was tuned for."""
        owner, name = self._slots[0]
        parameter = owner.get(name)
        if device.type == self._device.type and parameter is not None and parameter.device == device:
            self._rebind(module)

    def _look_at_parts(self, module: nn.Module) -> None:
        self._parts = self._adapter.parts(module)
        modules = [part for part in self._parts if isinstance(part, nn.Module)]
        self._hooks = [getattr(part, name) for part in modules for name in _HOOKS]
        self._slots = []
        for port in self._ports:
            path, _, name = port.name.rpartition(".")
            self._slots.append((module.get_submodule(path)._parameters, name))

    def _replaced(self, module: "TunedModule") -> Reason | None:
        """Look at a module anew after a part of it was replaced; say why it does not fit any more, or None."""
        from autotuner.runtime.module import check_fit

        try:
            check_fit(module, module.configuration)
        except (ConfigurationError, AttributeError) as error:
            return Reason("parts", f"a submodule was replaced: {error}")
        self._look_at_parts(module)
        return None

    def _other_settings(self, module: nn.Module) -> Reason:
        found = self._adapter.settings(self._parts)
        name, given, tuned = next(row for row in zip(SETTINGS, found, self._settings, strict=True) if row[1] != row[2])
        mode = "train" if module.training else "eval"
        return Reason("settings", f"{name} is {given} in {mode} mode, and it was tuned for {tuned}")

    def _rebind(self, module: "TunedModule") -> Reason | None:
        """Bind to the memory that the parameters have now, laying them out again where it does not fit."""
        found = [owner.get(name) for owner, name in self._slots]
        wanted = self._device
        for port, lies, parameter in zip(self._ports, self._lying, found, strict=True):
            if type(parameter) is not nn.Parameter:
                return Reason("parameters", f"{port.name} is a {type(parameter).__name__}, no parameter")
            if parameter.device.type == wanted.type and port is self._ports[0]:
                wanted = parameter.device  # all others have to be there as well
            if tuple(parameter.shape) != lies.shape or parameter.dtype != self._dtype or parameter.device != wanted:
                return Reason(
                    "parameters",
                    f"{port.name} is {dtype_name(parameter.dtype)} {tuple(parameter.shape)} on {parameter.device}, and "
                    f"it was tuned for {dtype_name(self._dtype)} {lies.shape} on {wanted}",
                )
        self._device = wanted
        parameters: list[nn.Parameter] = [parameter for parameter in found if parameter is not None]
        with torch.inference_mode(False), torch.no_grad():
            lacking = self._lacking(parameters)
            if self._is_first:
                for number, members in lacking.items():
                    self._lay_out(number, members)
            copied = {} if self._is_first else lacking
            views = dict(
                view for port, lies, parameter in zip(self._ports, self._lying, parameters, strict=True)
                if lies.buffer not in copied for view in self._views(port, lies, parameter)
            )  # fmt: skip
        if lacking and self._is_first and self.parameters:
            module.relayed()
        self.parameters = parameters
        self._strides = [parameter.stride() for parameter in parameters]
        self._memory = [(parameter.data_ptr(), parameter.stride()) for parameter in parameters]
        sources = {number: [(lies, p.data) for lies, p in members] for number, members in copied.items()}
        self.pool = Pool(self._plan, self._boundary, views, wanted, self._graphs, sources)
        return None

    def _lacking(self, parameters: Sequence[nn.Parameter]) -> dict[int, list[tuple[Geometry, nn.Parameter]]]:
        """Return the parameters of those buffers that have not the planned strides and distances."""
        found: dict[int, list[tuple[Geometry, nn.Parameter]]] = defaultdict(list)
        for lies, parameter in zip(self._lying, parameters, strict=True):
            found[lies.buffer].append((lies, parameter))
        return {number: members for number, members in found.items() if not _lie_as_planned(members)}

    def _lay_out(self, number: int, members: Iterable[tuple[Geometry, nn.Parameter]]) -> None:
        """Give a buffer's parameters memory of the planned strides and distances."""
        base = torch.empty(self._plan.buffers[number].elements, dtype=self._dtype, device=self._device)
        for lies, parameter in members:
            view = base.as_strided(lies.shape, lies.strides, lies.offset)
            view.copy_(parameter)
            parameter.data = view

    def _views(self, port: Port, lies: Geometry, parameter: nn.Parameter) -> list[tuple[str, Tensor]]:
        """Return the graph's parameters over the memory of a module's parameter."""
        found = []
        for member in port.members:
            place = self._plan.parameters[member]
            offset = self._plan.buffers[lies.buffer].offsets[place] - lies.offset
            view = parameter.data.as_strided(
                self._plan.shape(place), self._plan.strides(place), parameter.storage_offset() + offset
            )
            found.append((member, view))
        return found


def dims_of(adapter: Adapter, module: nn.Module) -> tuple[str, str, str]:
    """Return the axes of a module's input and output, in their order."""
    return ("b", "l", "h") if adapter.batch_first(module) else ("l", "b", "h")


def _lie_as_planned(members: Iterable[tuple[Geometry, Tensor]]) -> bool:
    found = list(members)
    starts = {(p.untyped_storage().data_ptr(), p.storage_offset() - lies.offset) for lies, p in found}
    return len(starts) == 1 and all(_strides_fit(lies, p) for lies, p in found)


def _strides_fit(lies: Geometry, parameter: Tensor) -> bool:
    return all(
        extent == 1 or planned == actual
        for extent, planned, actual in zip(lies.shape, lies.strides, parameter.stride(), strict=True)
    )
