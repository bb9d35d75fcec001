"""Gradients of embeddings in a backward that Inductor compiles: rows are added where they belong.

Inductor adds the gradients of all tokens to zeros of the whole embedding in float32, rounds all of that, and adds it to
the gradient of a head that shares the weight. Here the gradients of a token's occurrences are added up in one row of
scratch, as many rows as there are tokens, and only the rows of words that occur are added to the head's gradient, or
to zeros of the weight's own type: a word more costs nothing.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

OPTION = "post_grad_custom_pre_pass"
"""Of Inductor: what is done to a graph before its own last passes."""
WORDS_MIN = 2
"""Words for each token: with fewer, the whole weight is no larger than what its rows need."""

aten, prims = torch.ops.aten, torch.ops.prims
EMBEDDING = aten.embedding_dense_backward.default
PLAIN = aten.index_put.default
MASKED = getattr(aten, "_unsafe_masked_index_put_accumulate", None)
"""Of torch 2.13, in place of the first one."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of an embedding in a graph.

    Args:
        zeros: of the whole weight, in the type in which gradients are added.
        ids: the words.
        values: a gradient for each of them, zeros where it does not count.
        mask: which of them count; None for all.
        made: what is handed on: the sum, rounded, with the gradient of a head.
        head: that gradient.
    """

    zeros: fx.Node
    ids: fx.Node
    values: fx.Node
    mask: fx.Node | None
    made: fx.Node
    head: fx.Node | None


class EmbeddingGradients(CustomGraphPass):
    """Rewrites the gradients of embeddings in a graph; see above."""

    def __call__(self, graph: fx.Graph) -> None:
        if torch.are_deterministic_algorithms_enabled():
            return
        for node in list(graph.nodes):
            found = gradient_of(node)
            if found is not None:
                rewrite(graph, found)
        graph.eliminate_dead_code()

    def uuid(self) -> str:
        """Return what tells compiled code with this pass from other code."""
        return _digest()


@cache
def _digest() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def gradient_of(node: fx.Node) -> Gradient | None:
    """Return the gradient of an embedding that a node adds up, where rewriting it pays; None where there is none."""
    # By its name: graphs have copies of operators there. Sums of one's own code look alike, and may be of any type.
    if node.op != "call_function" or str(node.meta.get("original_aten")) != str(EMBEDDING):
        return None
    if node.target not in (PLAIN, getattr(MASKED, "default", None)) or node.kwargs:
        return None
    if node.target == PLAIN:
        zeros, indices, values, *accumulate = node.args
        mask = None
        if accumulate != [True]:
            return None
    else:
        zeros, mask, indices, values = node.args
    ids = indices[0] if isinstance(indices, Sequence) and len(indices) == 1 else None
    if not isinstance(zeros, fx.Node) or not isinstance(values, fx.Node) or not isinstance(ids, fx.Node):
        return None
    if zeros.target != aten.full.default or zeros.args[1] != 0 or not _fits(zeros, ids, values, mask):
        return None
    rounded = _only_user(node, prims.convert_element_type.default)
    if rounded is not None and not _is_narrower(rounded, zeros):
        return None
    made = rounded or node
    both = _only_user(made, aten.add.Tensor)
    head = None
    if both is not None and not both.kwargs:
        head = next((each for each in both.args if isinstance(each, fx.Node) and each is not made), None)
    if head is not None and _can_take(head, made):
        return Gradient(zeros, ids, values, mask, both, head)  # type: ignore[arg-type]
    return None if rounded is None else Gradient(zeros, ids, values, mask, rounded, None)  # type: ignore[arg-type]


def rewrite(graph: fx.Graph, gradient: Gradient) -> None:
    """Put operators in a gradient's place that touch the rows of its words alone."""
    made, zeros = _value(gradient.made), _value(gradient.zeros)
    words, features = zeros.shape
    tokens = _value(gradient.ids).numel()

    with graph.inserting_before(gradient.made):

        def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
            node = graph.call_function(target, args, kwargs)
            given, named = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
            with zeros.fake_mode:
                node.meta["val"] = target(*given, **named)
            return node

        def filled(shape: Sequence[int], number: float, dtype: torch.dtype) -> fx.Node:
            return call(
                aten.full.default, list(shape), number, dtype=dtype, layout=torch.strided, device=made.device,
                pin_memory=False,
            )  # fmt: skip

        values, ids = gradient.values, gradient.ids
        if gradient.mask is not None:
            counts = call(aten.squeeze.dim, gradient.mask, -1)
            values = call(aten.where.self, gradient.mask, values, filled((), 0.0, zeros.dtype))
            ids = call(aten.where.self, counts, ids, filled((), 0, _value(ids).dtype))  # else they may be any number
        values = call(aten.reshape.default, values, [tokens, features])
        ids = call(aten.reshape.default, ids, [tokens])
        if made.dtype == zeros.dtype:
            found = call(aten._unsafe_index_put.default, gradient.head, [ids], values, True)
        else:
            # One of the tokens of each word stands for it, whichever comes out.
            order = call(
                prims.iota.default, tokens, start=0, step=1, dtype=torch.int64, device=made.device, requires_grad=False
            )
            chosen = call(aten._unsafe_index_put.default, filled((words,), 0, torch.int64), [ids], order, False)
            row = call(aten.index.Tensor, chosen, [ids])
            scratch = call(
                aten._unsafe_index_put.default, filled((tokens, features), 0.0, zeros.dtype), [row], values, True
            )
            sums = call(aten.index.Tensor, scratch, [row])
            whole = gradient.head or filled((words, features), 0.0, made.dtype)
            if gradient.head is not None:
                before = call(aten.index.Tensor, whole, [ids])
                before = call(prims.convert_element_type.default, before, zeros.dtype)
                sums = call(aten.add.Tensor, before, sums)
            rows = call(prims.convert_element_type.default, sums, made.dtype)
            found = call(aten._unsafe_index_put.default, whole, [ids], rows, False)  # equal rows for equal words
    gradient.made.replace_all_uses_with(found)


def _fits(zeros: fx.Node, ids: fx.Node, values: fx.Node, mask: Any) -> bool:
    """Tell whether rows of a matrix are added up, of far more words than there are tokens, and all sizes are known."""
    of_zeros, of_ids, of_values = (_value(each) for each in (zeros, ids, values))
    if any(not isinstance(each, Tensor) for each in (of_zeros, of_ids, of_values)):
        return False
    if mask is not None and (not isinstance(mask, fx.Node) or tuple(_value(mask).shape) != (*of_ids.shape, 1)):
        return False
    sizes = (*of_zeros.shape, *of_ids.shape, *of_values.shape)
    return (
        all(isinstance(size, int) for size in sizes)
        and of_zeros.ndim == 2
        and of_zeros.dtype == of_values.dtype
        and of_zeros.dtype in (torch.float32, torch.float64)
        and of_ids.dtype in (torch.int64, torch.int32)
        and tuple(of_values.shape) == (*of_ids.shape, of_zeros.shape[1])
        and WORDS_MIN * of_ids.numel() <= of_zeros.shape[0]
    )


def _only_user(node: fx.Node, target: Any) -> fx.Node | None:
    user = next(iter(node.users), None)
    return user if user is not None and len(node.users) == 1 and user.target == target else None


def _is_narrower(rounded: fx.Node, whole: fx.Node) -> bool:
    """Tell whether a type holds nothing that the type of another tensor does not hold."""
    narrow, wide = _value(rounded).dtype, _value(whole).dtype
    return bool(narrow.is_floating_point) and torch.promote_types(narrow, wide) == wide


def _can_take(head: fx.Node, made: fx.Node) -> bool:
    """Tell whether a head's gradient can be written to: it is alike, and each element has memory of its own.

    To Inductor, a view of one row for many words stays a view, also where torch would copy it.
    """
    own, other = _value(head), _value(made)
    alike = isinstance(own, Tensor) and (own.shape, own.dtype, own.device) == (other.shape, other.dtype, other.device)
    is_view = getattr(head.target, "is_view", False) or head.target == aten._unsafe_view.default
    return alike and own.is_contiguous() and not is_view


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")
