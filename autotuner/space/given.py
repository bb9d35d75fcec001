"""The forms that tensors may have where the graph meets its caller."""

from itertools import permutations

from autotuner.errors import SpaceError
from autotuner.ir.graph import Graph


def given_forms(graph: Graph, *, chained: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the forms that tensors may have where the graph meets its caller.

    Inputs, parameters, outputs and their gradients are as declared: contiguous, as the framework makes them.

    Args:
        chained: the graph is one of many equal layers in a row, so what they hand each other may lie in any order.

    Raises:
        SpaceError: chained, but the output is no input of another such layer.
    """
    joined = set(chain_ends(graph)) if chained else set()
    given: dict[str, tuple[str, ...]] = {}
    for name, tensor in graph.tensors.items():
        if tensor.role in ("input", "parameter") or name in graph.given_gradients or name in graph.outputs:
            orders = permutations(tensor.axes) if name in joined else ()
            given[name] = tuple(dict.fromkeys((tensor.axes, *("".join(order) for order in orders))))
    return given


def chain_ends(graph: Graph) -> tuple[str, str, str, str]:
    """Return the tensors by which equal layers meet: input, output, the output's gradient, the input's.

    Raises:
        SpaceError: there is not one input that has a gradient and one output, of the same axes and element type.
    """
    inputs = [
        name for name, tensor in graph.tensors.items() if tensor.role == "input" and f"grad_{name}" in graph.outputs
    ]
    outputs = [name for name in graph.outputs if graph.tensors[name].role != "gradient"]
    if len(inputs) == len(outputs) == 1:
        (source,), (result,) = inputs, outputs
        one, other = graph.tensors[source], graph.tensors[result]
        if (one.axes, one.dtype) == (other.axes, other.dtype):
            return source, result, f"grad_{result}", f"grad_{source}"
    raise SpaceError(
        f"{graph.name}: layers of it cannot be chained: its inputs with gradients are {inputs}, its outputs {outputs}; "
        "there must be one of each, of the same axes"
    )
