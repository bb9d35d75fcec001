"""The forms that tensors may have where the graph meets its caller."""

from autotuner.ir.graph import Graph


def given_forms(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the forms that tensors may have where the graph meets its caller.

    Inputs, parameters, outputs and their gradients are as declared: contiguous, as the framework makes them.
    """
    return {
        name: (tensor.axes,)
        for name, tensor in graph.tensors.items()
        if tensor.role in ("input", "parameter") or name in graph.given_gradients or name in graph.outputs
    }
