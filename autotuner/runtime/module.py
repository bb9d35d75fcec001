"""A framework module that runs a configuration: same parameters, same calls, the original where it does not fit."""

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from autotuner.errors import ConfigurationError
from autotuner.plan.configuration import Configuration
from autotuner.runtime.adapter import Adapter, check_fit
from autotuner.runtime.binding import PLAIN, Binding
from autotuner.runtime.fallbacks import TALLY, Key, Reason, Summary, count_fallback, warn
from autotuner.runtime.graphs import Switch
from autotuner.runtime.layer_operator import LayerRuns, new_place
from autotuner.runtime.region_operator import key_of, tuned_region
from autotuner.runtime.region_plan import MisfitError

Original = Callable[[Tensor], Tensor]
Kind = TypeVar("Kind", bound=nn.Module)

# What a drop-in has beside what its original has.
_OWN = (
    "configurations", "shapes", "calls", "fallbacks", "told", "graphs", "runs", "key", "names", "compiler", "_bindings",
)  # fmt: skip


def is_exported() -> bool:
    """Tell whether torch.export or torch.jit.trace makes a program of what is called."""
    # The flag rather than `is_exporting()`, which older versions of the compiler take to be true always.
    is_traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return torch.compiler._is_exporting_flag or is_traced


class DropIn(nn.Module):
    """A module that runs configurations in place of another one, and counts its calls.

    Parameters and submodules are the original's own objects, as the framework made them.

    Attributes:
        configurations: what it runs.
        calls: how many calls ran a configuration.
        fallbacks: how many calls ran the original, by reason; `told`, by reason and shape of x, for the summary.
        graphs: whether CUDA graphs are made.
    """

    original: ClassVar[type[nn.Module]]
    configurations: tuple[Configuration, ...]
    calls: int
    fallbacks: Counter[str]
    told: Counter[Key]
    graphs: bool = True

    @property
    def configuration(self) -> Configuration:
        return self.configurations[0]

    def count_call(self) -> None:
        self.__dict__["calls"] += 1
        TALLY.calls += 1

    def count_fallback(self, reason: Reason, x: Any) -> None:
        name = self.original.__name__
        self.fallbacks[reason.key] += 1
        plain = type(x) is Tensor and not x.is_nested and all(type(extent) is int for extent in x.shape)
        shape = tuple(x.shape) if plain else ()
        for counter in (self.told, TALLY.fallbacks):
            count_fallback(counter, (name, reason.key, shape))
        if self.fallbacks[reason.key] == 1:
            warn(f"the original {name} runs, not the configuration: {reason.sentence}")

    def __prepare_scriptable__(self) -> nn.Module:
        """Return what `torch.jit.script` compiles: the original."""
        return restore(self)


class TunedModule(DropIn):
    """Base of drop-ins for layers of known classes. A subclass also derives from the framework's class and calls `run`
    in its forward. See `Binding` for its parameters.

    Attributes:
        configurations: one for each shape of the input, mode, and with or without a mask over keys.
        shapes: those of x that the configurations are for.
    """

    adapter: ClassVar[Adapter]
    keeps: ClassVar[bool]  # whether a boolean mask is true where a key counts, or where it does not
    shapes: tuple[torch.Size, ...]
    runs: LayerRuns | None  # what compiled code runs
    key: Tensor  # by which compiled code knows it
    names: tuple[str, ...]  # of its parameters, in the order of the ports
    call_original: Callable[[Tensor, Tensor | None], Tensor]  # the framework's forward with a mask over keys, no more
    _bindings: tuple[Binding, ...]

    def run(self, x: Tensor, mask: Tensor | Reason | None, original: Original) -> Tensor:
        """Run the configuration that covers this call, or else the original.

        Args:
            x: as the framework's forward gets it.
            mask: over keys, as the framework's forward gets it, or why no configuration covers the call's arguments.
            original: the framework's forward with all other arguments bound.
        """
        if is_exported():  # a program that runs elsewhere has no operators of ours
            return original(x)
        if torch.compiler.is_dynamo_compiling():
            return self._run_in_compiled_model(x, mask, original)
        found = self.covering(x, mask)
        if isinstance(found, Reason):
            return self._fall_back(found, original, x)
        binding, added = found
        parameters = binding.current()
        try:
            if not all(type(parameter) in PLAIN for parameter in parameters):
                raise MisfitError
            (y,) = binding.region.call(binding.inputs(x, added), parameters)
        except MisfitError:
            reason = binding.rebind(parameters)
            if reason is None:
                raise
            return self._fall_back(reason, original, x)
        self.count_call()
        return y.contiguous()

    def covering(self, x: Tensor, mask: Tensor | Reason | None) -> "tuple[Binding, Tensor | None] | Reason":
        """Return the binding that covers a call, with the mask that it adds to the scores; or why there is none.

        Of several for one shape and mode, calls without a mask prefer one that was tuned without, and the other way
        round.
        """
        if isinstance(mask, Reason):
            return mask
        try:
            bindings = self._bindings or self.bind()
        except (ConfigurationError, AttributeError) as error:  # a copy whose parameters or parts were changed
            return Reason("parts", f"the module has changed: {error}")
        if len(bindings) > 1 and isinstance(x, Tensor) and not x.is_nested:
            fitting = [binding for binding in bindings if binding.shape == x.shape] or [bindings[0]]
            bindings = tuple(sorted(fitting, key=lambda binding: binding.masked == (mask is None)))
        reason: Reason | None = None
        spare: tuple[Binding, None] | None = None
        for binding in bindings:
            found = binding.uncovered(self, x)
            if found is None:
                added = binding.mask_for(self, mask, self.keeps)
                if added is None and mask is not None and binding.masked:  # it masks nothing: better without
                    spare = spare or (binding, None)
                elif not isinstance(added, Reason):
                    return binding, added
                else:
                    found = added
            if reason is None or (
                found is not None and found.key == "mask"
            ):  # whose mask alone is in the way says most
                reason = found
        return spare or reason  # type: ignore[return-value]  # one of both, since there is a binding

    def _run_in_compiled_model(self, x: Tensor, mask: Tensor | Reason | None, original: Original) -> Tensor:
        if not isinstance(mask, Reason) and (mask is None or not mask.requires_grad):
            for binding in self._bindings:
                if binding.fits(self, x):
                    parameters = [self.get_parameter(name) for name in self.names]
                    inputs, results = ([x], binding.results) if mask is None else ([x, mask], binding.masked_results)
                    made: tuple[list[Tensor], Tensor] = tuned_region(
                        new_place(), x, inputs, parameters, results, self.key
                    )
                    return made[0][0].contiguous()
        return _outside_the_compiled_graph(self, x, mask, original)

    def _fall_back(self, reason: Reason, original: Original, x: Tensor) -> Tensor:
        """Run the original: counted, and with one warning per reason."""
        self.count_fallback(reason, x)
        return original(x)

    def bind(self) -> tuple[Binding, ...]:
        """Plan memory and build on the parameters; done anew after copying and loading.

        Raises:
            ConfigurationError: a configuration does not fit the module any more.
        """
        for configuration in self.configurations:
            check_fit(self.adapter, self, configuration, or_eval=True)
        graphs, places = Switch(self.graphs), range(len(self.configurations))
        bindings = tuple(
            Binding(self, self.adapter, self.configurations, self.shapes, place, graphs) for place in places
        )
        names = tuple(port.name for port in self.adapter.ports)
        runs = LayerRuns(self)
        self.__dict__.update(_bindings=bindings, runs=runs, key=key_of(runs), names=names)
        return bindings

    def skip_kernels(self) -> None:
        """Have what has run leave out its kernels from now on, which shows what a step costs beside them."""
        for binding in self._bindings:
            binding.region.skip_kernels()

    def renew(self) -> None:
        """Give up the memory of its calls; the next ones allocate theirs."""
        self.bind()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bindings": (), "runs": None}


@_disable_dynamo
def _outside_the_compiled_graph(
    module: TunedModule, x: Tensor, mask: Tensor | Reason | None, original: Original
) -> Tensor:
    """Run a tuned module in a model that torch.compile compiles: the graph breaks here, and goes on behind it."""
    return module.run(x, mask, original)


def restore(module: nn.Module) -> nn.Module:
    """Return the framework's module that a tuned one was made from, or a model with all its tuned layers restored.

    Parameters and submodules are shared, as in `apply`, and hooks are taken along. A tuned layer is left as it is, and
    a new module stands for the original. In any other module, tuned layers are replaced in place.
    """
    if isinstance(module, DropIn):
        made = sharing(module, module.original)
        for name in _OWN:
            made.__dict__.pop(name, None)
        return made
    restored: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, DropIn):
                if child not in restored:
                    restored[child] = restore(child)
                parent._modules[name] = restored[child]
    return module


def sharing(module: nn.Module, kind: type[Kind]) -> Kind:
    """Return a module of another class with the same parameters and submodules, and copies of what lists them."""
    made = kind.__new__(kind)
    made.__dict__.update(
        {name: value.copy() if isinstance(value, dict) else value for name, value in module.__dict__.items()}
    )
    return made


def summary(module: nn.Module | None = None) -> Summary:
    """Return how the calls of the tuned layers in a model ran; without a model, of all in this process."""
    if module is None:
        return TALLY.summary()
    found = [part for part in module.modules() if isinstance(part, DropIn)]
    fallbacks: Counter[Key] = Counter()
    for part in found:
        fallbacks.update(part.told)
    return Summary(sum(part.calls for part in found), fallbacks)
