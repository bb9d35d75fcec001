"""A drop-in for a module of any class: its calls are compiled, and the regions in them run configurations.

The compiler guards shapes, types, mode, masks and autocast. A call that no configuration is for runs the original's own
code.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.module import _has_any_global_hook

from autotuner.errors import ConfigurationError
from autotuner.plan.configuration import Configuration
from autotuner.runtime.binding import HOOKED, HOOKS
from autotuner.runtime.fallbacks import Reason
from autotuner.runtime.module import DropIn, is_exported, sharing
from autotuner.runtime.own_code import with_own_code

Compiled = Callable[..., Any]


class Compiler(Protocol):
    """A compiler of graphs that knows configurations; modules with the same one share what is compiled.

    Attributes:
        forwards: what was compiled with it, by the module's class.
    """

    forwards: dict[type[nn.Module], Any]

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> tuple[Compiled, str | None]:
        """Return compiled code, and why no region in it runs tuned, or None where one does."""


GRAPHS_MAX = 256
"""Graphs of one class and set of configurations: each shape and mode has one. Further ones run the original."""
UNCOMPILED = "torch made no graph of this call, and ran the module as it is"


class _Call(threading.local):
    """Reports of the graphs of the current call: None of one that runs tuned, or why it does not."""

    said: list[str | None] | None = None


_CALL = _Call()


class AppliedModule(DropIn):
    """Base of drop-ins for modules of any class; a subclass derives from that class as well.

    Attributes:
        compiler: of the graphs in its calls.
    """

    compiler: Compiler

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the original's forward, in which regions run tuned."""
        if is_exported():  # a program that runs elsewhere has no operators of ours
            return self.original.forward(self, *arguments, **keywords)
        if torch.compiler.is_dynamo_compiling():
            return _outside_the_compiled_graph(self, arguments, keywords)
        return _run(self, arguments, keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self.original,), self.__dict__


def _run(module: AppliedModule, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    first = next((each for each in (*arguments, *keywords.values()) if isinstance(each, Tensor)), None)
    if _has_hooks_inside(module):  # compiled code would not see those that were added since
        module.count_fallback(HOOKED, first)
        return module.original.forward(module, *arguments, **keywords)
    forward = _compiled(module.original, module.compiler)
    before, _CALL.said = _CALL.said, []
    try:
        made = forward(module, arguments, keywords)
        said = _CALL.said
    finally:
        _CALL.said = before
    if None in said:
        module.count_call()
    else:
        module.count_fallback(Reason("region", next(filter(None, said), UNCOMPILED)), first)
    return made


def _has_hooks_inside(module: nn.Module) -> bool:
    """Say whether any submodule has hooks, or all modules of the process have."""
    parts = (part for part in module.modules() if part is not module)
    return _has_any_global_hook() or any(getattr(part, name) for part in parts for name in HOOKS)  # type: ignore[no-untyped-call]


@_disable_dynamo
def _outside_the_compiled_graph(module: AppliedModule, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Run a module in a model that torch.compile compiles: the graph breaks here, and goes on behind it."""
    return _run(module, arguments, keywords)


class _Forward:
    """The compiled forward of a class: modules of it share what is compiled, where they share a compiler."""

    def __init__(self, original: type[nn.Module], compiler: Compiler) -> None:
        def forward(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            return original.forward(module, *arguments, **keywords)

        self._compiler, self._graphs = compiler, 0
        self._run = torch.compile(with_own_code(forward), backend=self._backend, dynamic=False)

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        limit = torch._dynamo.config.recompile_limit
        if self._graphs < limit:
            return self._run(module, arguments, keywords)
        with torch._dynamo.config.patch(recompile_limit=max(limit, GRAPHS_MAX)):
            return self._run(module, arguments, keywords)

    def _backend(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Compiled:
        self._graphs += 1
        compiled, reason = self._compiler(graph, inputs)

        def run(*arguments: Any) -> Any:
            if _CALL.said is not None:
                _CALL.said.append(reason)
            return compiled(*arguments)

        return run


_KINDS: dict[type[nn.Module], type[AppliedModule]] = {}


def _compiled(original: type[nn.Module], compiler: Compiler) -> _Forward:
    if original not in compiler.forwards:
        compiler.forwards[original] = _Forward(original, compiler)
    found: _Forward = compiler.forwards[original]
    return found


def _kind(original: type[nn.Module]) -> type[AppliedModule]:
    if original not in _KINDS:
        named = {"original": original, "__module__": original.__module__, "__qualname__": original.__qualname__}
        _KINDS[original] = type(original.__name__, (AppliedModule, original), named)
    return _KINDS[original]


def _blank(original: type[nn.Module]) -> AppliedModule:
    return _kind(original).__new__(_kind(original))


def applied(
    module: nn.Module, configurations: Sequence[Configuration], compiler: Compiler, *, graphs: bool = True
) -> nn.Module:
    """Return a drop-in for a module whose calls run configurations where they are for what these compute.

    It shares parameters and submodules with the module. `restore` is the way back.

    Args:
        module: on the device that the configurations are for.
        configurations: of regions in its calls, as `autotuner.tune(module, example_inputs)` returns them.
        compiler: holds the configurations, and compiles the graphs of calls.
        graphs: whether regions become CUDA graphs.

    Raises:
        ConfigurationError: no parameter of the module has the type and size of any of a configuration's; or it is for
            another device; or the module's forward was replaced on the instance, or is compiled already.
    """
    original = module.original if isinstance(module, DropIn) else type(module)
    if isinstance(module, torch._dynamo.OptimizedModule | torch.jit.ScriptModule):
        raise ConfigurationError(f"this is a compiled module, {original.__name__}: give the one that was compiled")
    if "forward" in module.__dict__:
        raise ConfigurationError(
            f"the forward of this {original.__name__} was replaced on the instance, which a tuned module would go on "
            "running: apply the configuration first, and patch or prepare the model (accelerate) after that"
        )
    for configuration in configurations:
        _check_parameters(module, configuration)
    made = sharing(module, _kind(original))
    made.__dict__.update(
        configurations=tuple(configurations), calls=0, fallbacks=Counter(), told=Counter(), graphs=graphs,
        compiler=compiler,
    )  # fmt: skip
    return made


def _check_parameters(module: nn.Module, configuration: Configuration) -> None:
    """Check what can be known before a call: the device, and sizes of parameters."""
    graph, wanted = configuration.model.graph(), str(configuration.environment["device_type"])
    found = {parameter.device.type for parameter in module.parameters()}
    if found and found != {wanted}:
        raise ConfigurationError(
            f"parameters of the module are on {' and '.join(sorted(found))}, and the configuration was measured on "
            f"{wanted}: move the module there, with module.to({wanted!r}), or give one that was measured there"
        )
    there = {(parameter.dtype, parameter.numel()) for parameter in module.parameters()}
    own = [
        (getattr(torch, tensor.dtype), torch.Size(graph.shape(name)))
        for name, tensor in graph.tensors.items() if tensor.role == "parameter"
    ]  # fmt: skip
    if own and not any((dtype, shape.numel()) in there for dtype, shape in own):
        dtype, shape = own[0]
        raise ConfigurationError(
            f"the configuration is of another module: its parameters have shapes such as {list(shape)} in {dtype}, and "
            f"no parameter of this {type(module).__name__} has the type and as many elements as any of them"
        )
