"""A framework module that runs a configuration: same parameters, same calls, the original where it does not fit."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from autotuner.configuration import Configuration
from autotuner.errors import ConfigurationError
from autotuner.kernels.registry import load
from autotuner.runtime.adapters import Description, adapter_for, refusal_of
from autotuner.runtime.binding import Binding, dims_of
from autotuner.runtime.function import TunedStep, run_forward
from autotuner.runtime.graphs import Switch
from autotuner.runtime.masks import MaskShape
from autotuner.runtime.opaque import key_of, new_place, tuned_layer
from autotuner.runtime.reason import Reason, TunedWarning
from autotuner.runtime.workspace import Lease

Original = Callable[[Tensor], Tensor]


class TunedModule(nn.Module):
    """What every drop-in shares. A subclass also derives from the framework's class and calls `run` in its forward.

    `calls` counts calls that ran a configuration, `fallbacks` those that ran the original, by reason, and `relaid`
    how often parameters had to be laid out again because somebody had replaced their memory. `graphs` says whether
    CUDA graphs are made. `shapes` are those of x that the configurations are for, `configuration` is the first.
    """

    original: ClassVar[type[nn.Module]]
    configurations: tuple[Configuration, ...]
    shapes: tuple[torch.Size, ...]
    calls: int
    fallbacks: Counter[str]
    relaid: int
    graphs: bool = True
    key: Tensor  # by which compiled code knows the module
    names: tuple[str, ...]  # of its parameters, in the order of the ports
    _bindings: tuple[Binding, ...]

    @property
    def configuration(self) -> Configuration:
        return self.configurations[0]

    def expects_mask(self, x: Tensor) -> MaskShape | None:
        """Return what a mask over keys is like where the input is x, None where there is none in the configuration."""
        model = self.configurations[self._place(x)].model
        if not model.options["attention_mask"]:
            return None
        return (model.extents["b"], model.extents["l"]), getattr(torch, model.dtype)

    def binding_for(self, x: Tensor) -> Binding:
        """Return the binding for x's shape, the first one where there is none."""
        if not self._bindings:
            self.bind()
        return self._bindings[self._place(x)]

    def _place(self, x: Tensor) -> int:
        if len(self.shapes) > 1 and isinstance(x, Tensor) and not x.is_nested:
            for place, shape in enumerate(self.shapes):
                if x.shape == shape:
                    return place
        return 0

    def run(self, x: Tensor, mask: Tensor | Reason | None, original: Original) -> Tensor:
        """Run the configuration if it covers this call, or else the original.

        Args:
            x: as the framework's forward gets it.
            mask: additive, over keys, or why the configuration does not cover the call's arguments.
            original: the framework's forward with all other arguments bound.
        """
        if torch.compiler.is_compiling():
            if not self._bindings or isinstance(mask, Reason):
                return _outside_the_compiled_graph(self, x, mask, original)
            binding = self._bindings[self._place(x)]
            parameters = [self.get_parameter(name) for name in self.names]
            if not binding.fits(self, x, mask, parameters):
                return _outside_the_compiled_graph(self, x, mask, original)
            made: tuple[Tensor, Tensor]
            made = tuned_layer(self.key, new_place(), x, mask, parameters, binding.gradient_strides)
            return made[0]
        binding = self.binding_for(x)
        reason = binding.uncovered(self, x, mask)
        if reason is not None:
            return self._fall_back(reason, original, x)
        self.__dict__["calls"] += 1
        if torch.is_grad_enabled():
            again = original if binding.repeatable else None
            y: Tensor = TunedStep.apply(binding.pool, mask, again, x, *binding.parameters)  # type: ignore[no-untyped-call]
            return y
        lease = Lease(binding.pool)
        return run_forward(lease.workspace, x, mask)  # type: ignore[arg-type]

    def _fall_back(self, reason: Reason, original: Original, x: Tensor) -> Tensor:
        """Run the original: counted, and with one warning per reason."""
        self.fallbacks[reason.key] += 1
        if self.fallbacks[reason.key] == 1:
            name = self.original.__name__
            warnings.warn(
                f"the original {name} runs, not the configuration: {reason.sentence}", TunedWarning, stacklevel=6
            )
        return original(x)

    def bind(self) -> Binding:
        """Lay parameters out as the first configuration says and plan memory; done anew after copying and loading."""
        adapter, graphs = adapter_for(self), Switch(self.graphs)
        bindings = tuple(Binding(self, place, adapter, graphs) for place in range(len(self.configurations)))
        self.__dict__.update(_bindings=bindings, key=key_of(self), names=tuple(port.name for port in adapter.ports))
        return bindings[0]

    def relayed(self) -> None:
        """Count that parameters were laid out again; warn once."""
        self.__dict__["relaid"] += 1
        if self.relaid == 1:
            warnings.warn(
                "parameters of a tuned module had been replaced by ones of another layout, and were laid out again",
                TunedWarning, stacklevel=8,
            )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bindings": ()}


@_disable_dynamo
def _outside_the_compiled_graph(
    module: TunedModule, x: Tensor, mask: Tensor | Reason | None, original: Original
) -> Tensor:
    """Run a tuned module in a model that torch.compile compiles: the graph breaks here, and goes on behind it."""
    return module.run(x, mask, original)


def describe(module: nn.Module) -> Description:
    """Return which model a framework module is.

    Raises:
        ConfigurationError: it cannot be tuned; the message says what about it.
    """
    adapter = adapter_for(module)
    refusal = refusal_of(adapter, module)
    if refusal is not None:
        raise ConfigurationError(f"this {type(module).__name__} cannot be tuned: {refusal}")
    return adapter.describe(module)


def check_fit(module: nn.Module, configuration: Configuration) -> None:
    """Check that a configuration was made for modules like this one.

    Raises:
        ConfigurationError: the message lists what differs.
    """
    found, model = describe(module), configuration.model
    pairs = [("model", found.model, model.name), ("dtype", found.dtype, model.dtype)]
    pairs += [(f"extent {axis}", extent, model.extents.get(axis)) for axis, extent in found.extents.items()]  # type: ignore[misc]
    pairs += [(name, value, model.options.get(name)) for name, value in found.options.items()]  # type: ignore[misc]
    wrong = [f"{name} is {given!r}, the configuration's {tuned!r}" for name, given, tuned in pairs if given != tuned]
    if wrong:
        raise ConfigurationError(f"the configuration is of another layer: {'; '.join(wrong)}")
    wanted = configuration.environment["device_type"]
    found_on = sorted({str(parameter.device) for parameter in module.parameters() if parameter.device.type != wanted})
    if found_on:
        raise ConfigurationError(
            f"parameters of the module are on {' and '.join(found_on)}, and the configuration was measured on "
            f"{wanted}: move the module there, with module.to({wanted!r}), or give one that was measured on "
            f"{torch.device(found_on[0]).type}"
        )


def check_all_fit(module: nn.Module, configurations: Sequence[Configuration]) -> None:
    """Check that configurations were made for modules like this one, each for inputs of its own shape.

    Raises:
        ConfigurationError: there is none; one is of another layer; two are for one shape; some know masks, some do not.
    """
    if not configurations:
        raise ConfigurationError("no configuration is given: give one, or one for each shape of the input")
    for number, configuration in enumerate(configurations, 1):
        try:
            check_fit(module, configuration)
        except ConfigurationError as error:
            if len(configurations) == 1:
                raise
            raise ConfigurationError(f"number {number} of {len(configurations)}: {error}") from None
    shapes = Counter((c.model.extents["b"], c.model.extents["l"]) for c in configurations)
    (batch, length), count = shapes.most_common(1)[0]
    if count > 1:
        raise ConfigurationError(f"{count} configurations are for b={batch} l={length}: give one for each shape")
    if len({bool(c.model.options["attention_mask"]) for c in configurations}) > 1:
        raise ConfigurationError(
            "some configurations were tuned with attention_mask=true and some without: give those with it, which run "
            "calls without a mask, too"
        )


def apply(
    module: nn.Module, configuration: Configuration | Sequence[Configuration], *, graphs: bool = True
) -> nn.Module:
    """Return a drop-in for a framework module that runs a configuration, or several, each for inputs of its shape.

    It shares parameters and submodules with the module; the parameters keep their values and shapes, and get the
    strides that the first configuration asks for. Where another one asks for others, its parameters are copied before
    each of its forwards.

    Args:
        module: nn.TransformerEncoderLayer or transformers' BertLayer, on the device that the configuration is for.
        configuration: tuned for its extents, options and dtype; of several, each for another `b` or `l`.
        graphs: on CUDA, capture forward and backward as CUDA graphs when they run for the second time, and replay them
            from then on. Ignored on the CPU.

    Raises:
        ConfigurationError: it was tuned for another layer; the message lists what differs. Or two are for one shape.
    """
    configurations = (configuration,) if isinstance(configuration, Configuration) else tuple(configuration)
    check_all_fit(module, configurations)
    adapter = adapter_for(module)
    kind: type[TunedModule] = load(adapter.tuned)
    tuned = kind.__new__(kind)
    tuned.__dict__.update(
        {name: value.copy() if isinstance(value, dict) else value for name, value in module.__dict__.items()}
    )
    dims = dims_of(adapter, module)
    tuned.__dict__.update(
        configurations=configurations,
        shapes=tuple(torch.Size(one.model.extents[axis] for axis in dims) for one in configurations),
        calls=0,
        fallbacks=Counter(),
        relaid=0,
        graphs=graphs,
        _bindings=(),
    )
    tuned.bind()
    return tuned
