"""The calls of a graph of dynamo's: the module that each is of, and its floating-point operations."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from math import prod
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from autotuner.runtime.capture.layers import bare_path

log = logging.getLogger("autotuner.capture")

EXAMPLE = "example_value"
NUMBERS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of constants whose text says all of them."""
OF_PYTHON = ("_operator", "builtins")
MOST = 4096
"""Calls whose flop a process keeps."""

_shared: dict[Any, int] = {}


@dataclass(frozen=True, eq=False)
class CountedCall:
    """A call of a graph, or of one that it calls itself, as checkpointing does.

    Args:
        node: the call in the graph, or in a body that it checkpoints; of any other inner one, the call that runs it.
        module: path of its module, as `named_modules` has it; "" where it is of the model itself or of none.
        flop: of its matrix products, convolutions and attention, as torch counts them; others have none.
        floating: whether it computes floating-point numbers.
    """

    node: fx.Node
    module: str
    flop: int
    floating: bool


def calls_of(graph: fx.Graph) -> list[CountedCall]:
    """Return the calls of a graph, in order. Nothing is computed: tensors have no memory."""
    with flop_counter() as counter, torch.no_grad():
        return list(_Counting(counter).calls(graph, None))


def flop_counter() -> FlopCounterMode:
    """Return torch's counter of flop, with the products of experts, which it does not count."""
    operators = (torch.ops.aten._grouped_mm, torch.ops.autotuner.grouped_product,
                 getattr(torch.ops.transformers, "grouped_mm_fallback", None))  # fmt: skip
    return FlopCounterMode(
        display=False, custom_mapping={each: _grouped_flop for each in operators if each is not None}
    )


def _grouped_flop(rows: tuple[int, ...], weights: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Return the flop of a grouped product: each row meets one matrix of those that are stacked."""
    return 2 * prod(rows) * weights[-1]


class _Counting:
    def __init__(self, counter: FlopCounterMode) -> None:
        self._counter = counter
        self._known: dict[str, int] = {}

    def calls(self, graph: fx.Graph, outer: fx.Node | None) -> Iterator[CountedCall]:
        for node in graph.nodes:
            if not node.op.startswith("call"):
                continue
            inner = _inner(graph, node)
            if inner is not None:
                is_read = node.target is torch.ops.higher_order.tag_activation_checkpoint
                yield from self.calls(inner, None if is_read else outer or node)
                continue
            made = pytree.tree_leaves(node.meta.get(EXAMPLE))
            floating = any(isinstance(each, Tensor) and each.is_floating_point() for each in made)
            yield CountedCall(outer or node, module_of(node), self._flop_or_none(node) if floating else 0, floating)

    def _flop_or_none(self, node: fx.Node) -> int:
        """Return the flop of a call, 0 where it cannot be counted: no count is worth a compilation."""
        try:
            return self._flop(node)
        except Exception:
            log.debug("the flop of %s were not counted", node, exc_info=True)
            return 0

    def _flop(self, node: fx.Node) -> int:
        examples = [each.meta.get(EXAMPLE) for each in node.all_input_nodes]
        tensors = [each for example in examples for each in pytree.tree_leaves(example) if isinstance(each, Tensor)]
        if not any(tensor.is_floating_point() for tensor in tensors):
            return 0
        shapes = [(tuple(map(_size, each.shape)), each.dtype, each.stride(), each.device) for each in tensors]
        flat, tree = pytree.tree_flatten((node.args, node.kwargs), is_leaf=is_node)
        constants = [None if is_node(part) else part for part in flat]
        key = repr((node.op, str(node.target), shapes, constants, tree))
        if key not in self._known:
            plain = all(type(each) is FakeTensor for each in tensors) and all(map(is_number, constants))
            shared_key = (node.target, key) if plain and is_torchs(node) else None
            found = _shared.get(shared_key)
            if found is None:
                found = self._counted(node)
                if found is not None and shared_key is not None and len(_shared) < MOST:
                    _shared[shared_key] = found
            self._known[key] = found or 0
        return self._known[key]

    def _counted(self, node: fx.Node) -> int | None:
        """Return the flop of a call, or None where it cannot be called by itself."""
        if node.target is functional.scaled_dot_product_attention:
            return _attention_flop(*_shapes_of_attention(node))
        before = self._counter.get_total_flops()
        try:
            run_on_examples(node)
        except Exception:
            return None
        return _size(self._counter.get_total_flops() - before)


def run_on_examples(node: fx.Node, within: AbstractContextManager[Any] | None = None) -> None:
    """Run a call of a graph by itself, on copies of its examples; these have no memory, so nothing is computed."""
    examples = [each.meta.get(EXAMPLE) for each in node.all_input_nodes]
    modes = {each.fake_mode for each in pytree.tree_leaves(examples) if isinstance(each, FakeTensor)}
    with ExitStack() as entered:
        for mode in modes:
            if mode.shape_env is not None:  # to look at a call is no reason to compile anew for another size
                entered.enter_context(mode.shape_env.suppress_guards())
        args, kwargs = pytree.tree_map(_copy, (node.args, node.kwargs), is_leaf=is_node)
        entered.enter_context(within or nullcontext())
        if node.op == "call_method":
            getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            node.target(*args, **kwargs)  # type: ignore[operator]


def module_of(node: fx.Node) -> str:
    """Return the path of the module whose forward made a call."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return bare_path(path)


def _inner(graph: fx.Graph, node: fx.Node) -> fx.Graph | None:
    """Return the first graph that a call is given to run, or None where there is none."""
    for given in node.all_input_nodes:
        found = getattr(graph.owning_module, str(given.target), None) if given.op == "get_attr" else None
        if isinstance(found, fx.GraphModule):
            return found.graph
    return None


def _shapes_of_attention(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of query, key and value, which may be one tensor, and may be given by name."""
    names = ("query", "key", "value")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return tuple(tuple(map(_size, given[name].meta[EXAMPLE].shape)) for name in names)  # type: ignore[union-attr]


def _attention_flop(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> int:
    places = 1
    for extent in query[:-1]:
        places *= extent
    return 2 * places * key[-2] * (query[-1] + value[-1])


def _copy(part: Any) -> Any:
    """Return an example in place of a node: a copy, so that a call that works in place changes nothing."""
    if not is_node(part):
        return part
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), part.meta.get(EXAMPLE))


def is_node(part: Any) -> bool:
    """Say whether a part of a call's arguments is a node of the graph."""
    return isinstance(part, fx.Node)


def is_torchs(node: fx.Node) -> bool:
    """Say whether a node calls a function of torch or Python, whose calls of ATen follow from its operands."""
    if node.op == "call_method":
        return True
    if isinstance(node.target, OpOverload):
        return node.target.namespace == "aten"
    module = getattr(node.target, "__module__", None) or ""
    is_function = isinstance(node.target, FunctionType | BuiltinFunctionType)
    return is_function and (module.partition(".")[0] == "torch" or module in OF_PYTHON)


def is_number(constant: Any) -> bool:
    """Say whether the text of a constant says all of it."""
    if isinstance(constant, slice):
        return all(map(is_number, (constant.start, constant.stop, constant.step)))
    return constant is Ellipsis or type(constant) in NUMBERS


def _size(extent: Any) -> int:
    """Return a number, or of a symbol what it is in the example."""
    return int(extent.node.hint or 0) if isinstance(extent, torch.SymInt) else int(extent)
