"""The forms that tensors may have where the graph meets its caller."""

from collections.abc import Iterable
from itertools import permutations

from autotuner.errors import SpaceError
from autotuner.graph import Graph
from autotuner.layout import STACK_AXIS


def given_forms(
    graph: Graph, families: Iterable[tuple[str, ...]], *, chained: bool = False
) -> dict[str, tuple[str, ...]]:
    """Return the forms that tensors may have where the graph meets its caller.

    Inputs, outputs and their gradients are as declared. A parameter, and its gradient with it, lies in an order that
    the framework's own parameter can take by strides alone: output axes then input axes, or the reverse.

    Args:
        chained: the graph is one of many equal layers in a row, so what they hand each other may lie in any order.

    Raises:
        SpaceError: chained, but the output is no input of another such layer.
    """
    joined = set(chain_ends(graph)) if chained else set()
    given: dict[str, tuple[str, ...]] = {}
    for name, tensor in graph.tensors.items():
        gradient_of = graph.tensors.get(name.removeprefix("grad_")) if tensor.role == "gradient" else None
        if tensor.role == "parameter":
            given[name] = _storable(graph, name, families)
        elif gradient_of and gradient_of.role == "parameter" and name in graph.outputs:
            given[name] = tuple(_of_gradients(text) for text in _storable(graph, gradient_of.name, families))
        elif tensor.role == "input" or name in graph.given_gradients or name in graph.outputs:
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


def _storable(graph: Graph, parameter: str, families: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return a parameter's forms: as declared, or with what a contraction sums over slowest."""
    axes = graph.tensors[parameter].axes
    reader = next((o for o in graph.consumers[parameter] if o.kind == "contraction"), None)
    if reader is None or len(axes) < 2:
        return (axes,)
    operand = reader.inputs.index(parameter)
    letters, result = reader.input_axes[operand], reader.output_axes[0]
    summed = "".join(a for a, x in zip(axes, letters, strict=True) if x not in result)
    kept = "".join(a for a, x in zip(axes, letters, strict=True) if x in result)
    stack = next((f for f in families if parameter in f and len(f) > 2), None) or next(
        (f for f in families if parameter in f), None
    )
    if stack:
        return axes, f"{summed}{STACK_AXIS}{kept}@{stack.index(parameter)}/{len(stack)}#{'+'.join(stack)}"
    return tuple(dict.fromkeys((axes, summed + kept, kept + summed)))


def _of_gradients(text: str) -> str:
    """Return a parameter's form as its gradient has it: a stack's members are the gradients of the parameter's."""
    form, mark, group = text.partition("#")
    return form + mark + "+".join(f"grad_{member}" for member in group.split("+") if member)
