"""Tensors from whose results no gradient comes back, such as those that are only compared: torch gives them none.

A region hands out a gradient for each of its parameters. Zeros would be another training than None: an optimizer decays
what has them, and moves it by what earlier steps have left.
"""

from collections.abc import Callable

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autotuner.runtime.capture.calls import EXAMPLE


def without_lost_gradients(graph: fx.Graph, is_changed: Callable[[fx.Node], bool]) -> None:
    """Detach what enters those parts of a graph that make no result of the graph but by numbers without a gradient.

    Args:
        is_changed: says whether a node's tensors are changed in place, so that others may read them.
    """
    passing = _passing(graph, is_changed)
    behind = next((node for node in graph.nodes if node.op not in ("placeholder", "get_attr")), None)
    for node in list(graph.nodes):
        if not _wants(node) or EXAMPLE not in node.meta:
            continue
        if node in passing:
            lost = [user for user in node.users if _wants(user) and user not in passing]
        else:
            lost = [] if node.op.startswith("call") else list(node.users)
            node.meta[EXAMPLE] = node.meta[EXAMPLE] if lost else _detached(node.meta[EXAMPLE])
        if lost and behind is not None:
            with graph.inserting_after(node) if node.op.startswith("call") else graph.inserting_before(behind):
                alone = graph.call_method("detach", (node,))
            alone.meta[EXAMPLE] = _detached(node.meta[EXAMPLE])
            for user in lost:
                user.replace_input_with(node, alone)


def _passing(graph: fx.Graph, is_changed: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Return the nodes to which a gradient may come back; of what nobody reads, another effect is taken to be why."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if _wants(node) and (
            not node.users or is_changed(node) or any(user.op == "output" or user in found for user in node.users)
        ):
            found.add(node)
    return found


def _wants(node: fx.Node) -> bool:
    """Say whether a gradient may be wanted of what a node makes."""
    if EXAMPLE not in node.meta:
        return node.op != "output"
    return any(isinstance(each, Tensor) and each.requires_grad for each in pytree.tree_leaves(node.meta[EXAMPLE]))


def _detached(example: object) -> object:
    return pytree.tree_map_only(Tensor, Tensor.detach, example)
