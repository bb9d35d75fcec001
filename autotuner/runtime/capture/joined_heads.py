"""Puts one operator in place of each head of a graph and its loss."""

import operator
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import astuple
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from autotuner.kernels.torch.cross_entropy import CrossEntropy
from autotuner.runtime.capture.aliases import Contexts
from autotuner.runtime.capture.calls import EXAMPLE
from autotuner.runtime.capture.changed_in_place import changed_in_place, name_of, storages_of
from autotuner.runtime.capture.heads import Head, head_of, rows_of
from autotuner.runtime.capture.plain_nodes import SUMS, VIEWS, example

HEAD = torch.ops.autotuner.linear_cross_entropy.default
NOTED = ("nn_module_stack", "stack_trace", "custom")


def join_heads(module: fx.GraphModule) -> list[Head]:
    """Put one operator in place of each head whose logits nobody else reads, and return these heads."""
    graph = module.graph
    heads = [head for node in graph.nodes if (head := head_of(node)) is not None]
    if not heads:
        return []
    places = {node: place for place, node in enumerate(graph.nodes)}
    changed, contexts = changed_in_place(graph), Contexts(graph)
    gone = {node for head in heads for node in head.calls}
    heads = [
        head for head in heads
        if not any(storages_of(node) & changed for node in head.operands)
        and not gone & set(head.operands)
        and _can_be_written(head, places, contexts.unrecorded)
    ]  # fmt: skip
    for head in heads:
        _write(graph, head, _place_of(head, places))
    graph.lint()
    module.recompile()
    return heads


def _place_of(head: Head, places: Mapping[fx.Node, int]) -> fx.Node:
    """Return the node that the operator has to stand before: whoever reads what it makes, or else the end."""
    return min((head.end, *head.readers), key=places.__getitem__)


def _can_be_written(head: Head, places: Mapping[fx.Node, int], unrecorded: Set[fx.Node]) -> bool:
    """Say whether all operands are there where the operator stands, and its gradients are those of its calls.

    Where the loss has some, they are recorded in all calls, or else a call would get what it has not: but for the
    linear layer, if it ran without.
    """
    place = _place_of(head, places)
    calls = {place, *head.calls} - (set() if example(head.linear).requires_grad else {head.linear})
    is_recorded = not example(head.end).requires_grad or len({node in unrecorded for node in calls}) == 1
    return is_recorded and all(places[node] < places[place] for node in head.operands)


def _write(graph: fx.Graph, head: Head, place: fx.Node) -> None:
    """Put one operator in a head's place: x goes through what took rows of the logits, and then meets the loss."""
    end = head.end
    wants = example(end).requires_grad
    of_linear = wants and example(head.linear).requires_grad
    of_bias = of_linear or (wants and any(name_of(node) in SUMS for node in head.between))  # it is added behind
    operands = ((head.x, of_linear), (head.weight, of_linear), (head.bias, of_bias))
    wanted = [want and each is not None and example(each).requires_grad for each, want in operands]
    features = example(head.x).shape[-1]
    noted = {key: head.linear.meta[key] for key in NOTED if key in head.linear.meta}
    with graph.inserting_before(place):
        rows: Any
        rows, weight, bias = _needed(graph, (head.x, head.weight, head.bias), wanted, noted)
        for node in head.between:
            if name_of(node) in ("getitem", "__getitem__"):
                rows = _call(graph, operator.getitem, (rows, rows_of(node.args[1], example(rows).ndim)), noted)
            elif name_of(node) in VIEWS:
                shape = [*example(node).shape[:-1], features]
                rows = _call(graph, torch.reshape, (rows, shape), noted)
        rows = _call(graph, torch.reshape, (rows, [-1, features]), noted)
        labels = _call(graph, torch.reshape, (head.labels, [-1]), noted)
        if head.is_turned:
            weight = _call(graph, torch.t, (weight,), noted)
        if bias is not None and example(bias).ndim != 1:
            bias = _call(graph, torch.reshape, (bias, [-1]), noted)
        arguments = (
            rows, weight, bias, labels, example(head.linear).dtype, example(end).dtype, wanted,
            [float(each) for each in astuple(head.settings)],
            _squares(graph, labels, head, noted),
        )  # fmt: skip
        made = _call(graph, HEAD, arguments, noted)
        loss = _call(graph, operator.getitem, (made, 0), noted)
        if head.z_loss is not None:
            _write_parts(graph, head, made, noted)
    loss.meta[EXAMPLE] = end.meta[EXAMPLE]
    end.replace_all_uses_with(loss)
    read = head.linear.all_input_nodes
    for node in reversed(head.calls):
        graph.erase_node(node)
    for node in read:
        if not node.users and node.op.startswith("call"):  # a weight that was turned
            graph.erase_node(node)


def _squares(graph: fx.Graph, labels: fx.Node, head: Head, noted: Mapping[str, Any]) -> fx.Node | None:
    """Write what the square of each row's log-sum-exp is multiplied by, where there is a z-loss."""
    if head.z_loss is None:
        return None
    wide = CrossEntropy.wide(example(head.linear).dtype)
    made = _call(graph, torch.full_like, (labels, head.z_loss.number), noted, dtype=wide)
    for factor in head.z_loss.factors:
        of_rows = _call(graph, torch.reshape, (factor, [-1]), noted) if example(factor).ndim else factor
        made = _call(graph, torch.mul, (made, of_rows), noted)
    for divisor in head.z_loss.divisors:
        made = _call(graph, torch.div, (made, divisor), noted)
    return made


def _write_parts(graph: fx.Graph, head: Head, made: fx.Node, noted: Mapping[str, Any]) -> None:
    """Give those who read one part of a loss with a z-loss, and want no gradient of it, what the operator made."""
    assert head.z_loss is not None
    total = head.z_loss.total
    for place, part in enumerate((head.loss, head.z_loss.calls[-1])):
        if set(part.users) != {total}:
            one = _call(graph, operator.getitem, (_call(graph, operator.getitem, (made, 4), noted), place), noted)
            one = _call(graph, torch.Tensor.to, (one, example(part).dtype), noted)
            part.replace_all_uses_with(one, delete_user_cb=lambda user: user is not total)


def _needed(
    graph: fx.Graph, operands: Sequence[fx.Node | None], wanted: Sequence[bool], noted: Mapping[str, Any]
) -> list[fx.Node | None]:
    """Return operands, without their history where no gradient is wanted of them."""
    return [
        each if each is None or want or not example(each).requires_grad else _call(graph, torch.detach, (each,), noted)
        for each, want in zip(operands, wanted, strict=True)
    ]


def _call(
    graph: fx.Graph, function: Any, args: tuple[Any, ...], noted: Mapping[str, Any], **given: Any
) -> fx.Node:  # fmt: skip
    """Write a call, with an example of what it makes."""
    node = graph.call_function(function, args, given)
    node.meta.update(noted)
    examples = fx.node.map_arg(args, lambda each: each.meta[EXAMPLE])
    modes = {each.meta[EXAMPLE].fake_mode for each in node.all_input_nodes if _is_fake(each)}
    with torch.no_grad(), next(iter(modes)) if modes else nullcontext():
        node.meta[EXAMPLE] = function(*examples, **given)
    return node


def _is_fake(node: fx.Node) -> bool:
    return isinstance(node.meta.get(EXAMPLE), FakeTensor)
