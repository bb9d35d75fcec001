"""A framework module that runs a configuration: same parameters, same calls, the original where it does not fit."""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from autotuner.configuration import Configuration
from autotuner.errors import ConfigurationError
from autotuner.kernels.registry import load
from autotuner.runtime.adapters import Description, adapter_for
from autotuner.runtime.binding import Binding
from autotuner.runtime.function import TunedStep, run_forward
from autotuner.runtime.opaque import key_of, new_place, tuned_layer
from autotuner.runtime.reason import Reason, TunedWarning
from autotuner.runtime.workspace import Lease

Original = Callable[[Tensor], Tensor]


class TunedModule(nn.Module):
    """What every drop-in shares. A subclass also derives from the framework's class and calls `run` in its forward.

    `calls` counts calls that ran the configuration, `fallbacks` those that ran the original, by reason, and `relaid`
    how often parameters had to be laid out again because somebody had replaced their memory. `graphs` says whether
    CUDA graphs are made.
    """

    original: ClassVar[type[nn.Module]]
    configuration: Configuration
    expects_mask: tuple[tuple[int, int], torch.dtype] | None
    calls: int
    fallbacks: Counter[str]
    relaid: int
    graphs: bool = True
    key: Tensor  # by which compiled code knows the module
    names: tuple[str, ...]  # of its parameters, in the order of the ports
    _binding: Binding | None

    def run(self, x: Tensor, mask: Tensor | Reason | None, original: Original) -> Tensor:
        """Run the configuration if it covers this call, or else the original.

        Args:
            x: as the framework's forward gets it.
            mask: additive, over keys, or why the configuration does not cover the call's arguments.
            original: the framework's forward with all other arguments bound.
        """
        binding = self._binding
        if torch.compiler.is_compiling():
            if binding is None or isinstance(mask, Reason) or not binding.fits(self, x, mask):
                return _outside_the_compiled_graph(self, x, mask, original)
            parameters = [self.get_parameter(name) for name in self.names]
            made: tuple[Tensor, Tensor]
            made = tuned_layer(self.key, new_place(), x, mask, parameters, binding.gradient_strides)
            return made[0]
        if binding is None:
            binding = self.bind()
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
        """Lay parameters out as the configuration says and plan its memory; done anew after copying and loading."""
        adapter = adapter_for(self)
        binding = Binding(self, self.configuration, adapter)
        self.__dict__.update(_binding=binding, key=key_of(self), names=tuple(port.name for port in adapter.ports))
        return binding

    def relayed(self) -> None:
        """Count that parameters were laid out again; warn once."""
        self.__dict__["relaid"] += 1
        if self.relaid == 1:
            warnings.warn(
                "parameters of a tuned module had been replaced by ones of another layout, and were laid out again",
                TunedWarning, stacklevel=8,
            )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_binding": None}


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
    refusal = adapter.refuses(module)
    if refusal is None:
        strange = [
            type(part)
            for part in adapter.parts(module)
            if isinstance(part, nn.Module)
            and not type(part).__module__.startswith(("torch.nn.modules.", "transformers."))
        ]
        if strange:
            refusal = f"it contains a {strange[0].__module__}.{strange[0].__qualname__}, whose computation is not known"
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


def apply(module: nn.Module, configuration: Configuration, *, graphs: bool = True) -> nn.Module:
    """Return a drop-in for a framework module that runs a configuration.

    It shares parameters and submodules with the module; the parameters keep their values and shapes, and get the
    strides that the configuration asks for.

    Args:
        module: nn.TransformerEncoderLayer or transformers' BertLayer, on the device that the configuration is for.
        configuration: tuned for its extents, options and dtype.
        graphs: on CUDA, capture forward and backward as CUDA graphs when they run for the second time, and replay them
            from then on. Ignored on the CPU.

    Raises:
        ConfigurationError: it was tuned for another layer; the message lists what differs.
    """
    check_fit(module, configuration)
    kind: type[TunedModule] = load(adapter_for(module).tuned)
    tuned = kind.__new__(kind)
    tuned.__dict__.update(
        {name: value.copy() if isinstance(value, dict) else value for name, value in module.__dict__.items()}
    )
    extents, options = configuration.model.extents, configuration.model.options
    with_mask = bool(options["attention_mask"])
    tuned.__dict__.update(
        configuration=configuration,
        expects_mask=((extents["b"], extents["l"]), getattr(torch, configuration.model.dtype)) if with_mask else None,
        calls=0,
        fallbacks=Counter(),
        relaid=0,
        graphs=graphs,
        _binding=None,
    )
    tuned.bind()
    return tuned
