"""Compiled graphs with symbolic sizes: shapes that are known run tuned, all others as the other compiler has them.

With torch's default for `dynamic`, dynamo compiles a model anew at its second shape, with sizes that are symbols. A
configuration is for one shape. So each shape that arrives is traced by itself, with its sizes as numbers; where a
region of it is known, that graph is compiled and runs from then on.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from autotuner.runtime.fallbacks import warn

log = logging.getLogger("autotuner.backend")

SHAPES = 8
"""Shapes of one graph that are traced by themselves, which takes as long as compiling that many models."""

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class UntunedError(Exception):
    """No region of a graph is known, so that it need not be compiled by itself."""


def symbolic_places(graph: fx.Graph) -> list[int]:
    """Return which inputs of a graph have sizes that are symbols, or are such sizes; none without such a tensor."""
    examples = [node.meta.get("example_value") for node in graph.nodes if node.op == "placeholder"]
    tensors = [i for i, each in enumerate(examples) if isinstance(each, Tensor) and _is_symbolic(each)]
    sizes = [i for i, each in enumerate(examples) if isinstance(each, SymInt)]
    return sorted(tensors + sizes) if tensors else []


class ShapeDispatch:
    """A graph with symbolic sizes, and graphs of its own for shapes of which a region is known."""

    def __init__(self, graph: fx.GraphModule, places: Sequence[int], tuned: Backend) -> None:
        """Keep a copy of the graph, before its compiler changes it.

        Args:
            places: of the inputs that tell shapes apart; see `symbolic_places`.
            tuned: compiles a graph whose sizes are numbers; raises `UntunedError` where none of its regions is known.
        """
        self._graph, self._places, self._tuned = _copy(graph), places, tuned
        self._by_shape: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._is_told = False

    def beside(self, dynamic: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call: it has other shapes run by the graph with symbolic sizes, as that was compiled."""
        self._dynamic = dynamic
        return self.__call__

    def __call__(self, *arguments: Any) -> Any:
        given = (arguments[place] for place in self._places)
        shape = tuple(each.shape if isinstance(each, Tensor) else int(each) for each in given)
        found = self._by_shape.get(shape)
        if found is None:
            if len(self._by_shape) >= SHAPES:
                self._tell()
                return self._dynamic(*arguments)
            found = self._by_shape[shape] = torch.compile(
                _copy(self._graph), backend=self._tuned, dynamic=False, fullgraph=True
            )
        try:
            return found(*arguments)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # before anything ran
            if found is self._dynamic:
                raise
            if not isinstance(getattr(error, "inner_exception", None), UntunedError):
                log.info("a shape is not compiled by itself: %s", error)
            self._by_shape[shape] = self._dynamic
        return self._dynamic(*arguments)

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            warn(
                f"a compiled model was called with more than {SHAPES} shapes: those that come later run untuned, since "
                "torch.compile makes sizes symbolic from the second shape on, and a configuration is for one shape; "
                'write torch.compile(model, backend="autotuner", dynamic=False), and give it batches of few shapes'
            )


def _is_symbolic(tensor: Tensor) -> bool:
    return any(type(extent) is not int for extent in tensor.shape)


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)
