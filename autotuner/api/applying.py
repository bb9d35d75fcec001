"""Putting configurations in place of a module: by its class where that is known, otherwise by compiling its calls."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, fx, nn

from autotuner.ir.models import known_models
from autotuner.plan.configuration import Configuration
from autotuner.runtime import apply as apply_to_layer
from autotuner.runtime.adapters import is_known


class ConfiguredCompiler:
    """The backend with configurations that are given; what is not tuned runs as it is."""

    def __init__(self, configurations: Sequence[Configuration], graphs: bool) -> None:
        self.configurations, self.graphs = tuple(configurations), graphs
        self.forwards: dict[type[nn.Module], Any] = {}

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> tuple[Callable[..., Any], str | None]:
        """Return compiled code, and why no region in it runs tuned, or None where one does."""
        from autotuner.api.backend import COMPILED, compile_graph

        options = {"configurations": list(self.configurations), "graphs": self.graphs, "compiler": "eager"}
        compiled = compile_graph(graph, inputs, options=options)
        made = COMPILED[-1]
        return compiled, None if made.tuned_places else made.note or made.headline

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "forwards": {}}

    def __deepcopy__(self, _: Any) -> "ConfiguredCompiler":
        return self


_COMPILERS: "WeakValueDictionary[tuple[tuple[int, ...], bool], ConfiguredCompiler]" = WeakValueDictionary()
"""Compilers that modules hold, by the identities of their configurations."""


def apply(module: nn.Module, configurations: Sequence[Configuration], *, graphs: bool = True) -> nn.Module:
    """Return a drop-in for a module that runs configurations; see `autotuner.apply`."""
    if not configurations or (is_known(module) and any(each.model.name in known_models() for each in configurations)):
        return apply_to_layer(module, configurations, graphs=graphs)
    from autotuner.runtime.applied import applied

    key = tuple(map(id, configurations)), graphs  # a compiler holds them, so no others get their identities meanwhile
    compiler = _COMPILERS.get(key)
    if compiler is None:
        compiler = _COMPILERS[key] = ConfiguredCompiler(configurations, graphs)
    return applied(module, configurations, compiler, graphs=graphs)
