"""Gradients that layers hand on to what made their inputs."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from autotuner.runtime.layer_to_layer.call import RepeatedCall

Key = tuple[Any, int]
"""An output of a node of a graph: torch's own edges of one output are not equal."""


def key_of(edge: GradientEdge) -> Key:
    return edge.node, edge.output_nr


def first_uses(calls: Sequence[Sequence[RepeatedCall]]) -> list[dict[int, dict[Key, GradientEdge]]]:
    """Return, for each micro-batch, which tensors' gradients are complete behind the backward of which call.

    A tensor may go to several layers. Backward comes to the first of them last.
    """
    found: list[dict[int, dict[Key, GradientEdge]]] = []
    for number in range(len(calls[0])):
        seen: set[Key] = set()
        uses: dict[int, dict[Key, GradientEdge]] = {}
        for place, of_layer in enumerate(calls):
            for edge in of_layer[number].inputs.edges.values():
                if key_of(edge) not in seen:
                    seen.add(key_of(edge))
                    uses.setdefault(place, {})[key_of(edge)] = edge
        found.append(uses)
    return found


def share_nodes(loss: Tensor, others: Sequence[Any]) -> bool:
    """Say whether a loss and other tensors have nodes of their graphs in common that keep tensors for backward."""

    def reached(nodes: list[Any]) -> set[Any]:
        seen: set[Any] = set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                nodes.extend(following for following, _ in node.next_functions)
        return {node for node in seen if not hasattr(node, "variable")}

    return not reached([loss.grad_fn]).isdisjoint(reached(list(others)))
