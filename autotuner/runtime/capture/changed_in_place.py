"""Tensors that a graph changes in place, and the nodes that do it."""

import inspect
import operator

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional
from torch.utils import _pytree as pytree

from autotuner.runtime.capture.calls import EXAMPLE


def name_of(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls; "" where it calls none."""
    if node.op not in ("call_function", "call_method"):
        return ""
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))


def called(node: fx.Node) -> str:
    """Return the name of the method, or of the function of torch's or Python's, that a node calls; else ""."""
    name = name_of(node)
    own = (getattr(module, name, None) for module in (torch, functional, operator))
    return name if node.op == "call_method" or (name and node.target in own) else ""


def storages_of(node: fx.Node) -> set[int]:
    """Return the storages of what a node makes."""
    return {_storage(example) for example in _examples(node)}


def _examples(node: fx.Node) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(node.meta.get(EXAMPLE)) if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(_plain(tensor).untyped_storage()._cdata)


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor inside of one that a transform of `torch.func` has wrapped, which has no storage of its own."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def changed_in_place(graph: fx.Graph) -> set[int]:
    """Return the storages of tensors that some node changes in place, or writes its result to."""
    found: set[int] = set()
    made_changed: dict[int, int] = {}  # FlexAttention counts changes of its result before anybody else has it
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if node.target is torch.ops.higher_order.flex_attention:
            made_changed |= {_storage(each): each._version for each in _examples(node)}
        name = name_of(node)
        of_operator = getattr(operator, name, None) is node.target
        writes = (
            name in ("setitem", "__setitem__")
            or (name.startswith("__i") and name[3:-2] in _IN_PLACE)
            or (of_operator and name.startswith("i") and name[1:] in _IN_PLACE)
            or (not of_operator and name.endswith("_") and not name.endswith("__"))
            or _is_in_place(node)
        )
        if writes:
            for given in node.all_input_nodes if name.startswith("_foreach") else node.all_input_nodes[:1]:
                found |= storages_of(given)
        for given in _written_by_schema(node):
            found |= storages_of(given)
        if _version_of(node) > max((made_changed.get(each, 0) for each in storages_of(node)), default=0):  # whoever did
            found |= storages_of(node)
        if name == "embedding" and len(node.args) > 3 and node.args[3] is not None:  # it scales rows of its weight
            for given in node.all_input_nodes:
                found |= storages_of(given)
        out = node.kwargs.get("out")
        for each in out if isinstance(out, tuple | list) else [out]:
            found |= storages_of(each) if isinstance(each, fx.Node) else set()
    return found


def _written_by_schema(node: fx.Node) -> list[fx.Node]:
    """Return what an operator of torch's, or of a user's, writes to by one of its schemas."""
    target = node.target
    names: list[str] = target.overloads() if isinstance(target, OpOverloadPacket) else []  # type: ignore[no-untyped-call]
    overloads = [getattr(target, name) for name in names] or [target]
    writes = any(isinstance(each, OpOverload) and each._schema.is_mutable for each in overloads)
    return node.all_input_nodes if writes else []


def _version_of(node: fx.Node) -> int:
    """Return how often a tensor that the graph makes is changed in place, its views among it."""
    example = node.meta.get(EXAMPLE)
    return example._version if isinstance(example, Tensor) and not example.is_inference() else 0


def _is_in_place(node: fx.Node) -> bool:
    """Say whether a function is told to work in place."""
    if node.kwargs.get("inplace") is True:
        return True
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a built-in function, or a method
        return False
    return given.arguments.get("inplace") is True


_IN_PLACE = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
