"""Fragments: the ATen calls of one node as a graph of their own. Equal nodes of all graphs share a fragment."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autotuner.runtime.capture.calls import EXAMPLE, NUMBERS, is_node, is_number, is_torchs

MOST = 2048
"""Fragments that a process keeps; one takes some 20 kB."""

_shared: OrderedDict[Any, fx.GraphModule] = OrderedDict()
_lock = Lock()
_examples = FakeTensorMode()


class Fragments:
    """The fragments of a graph's nodes, traced once for nodes that make the same calls."""

    def __init__(self) -> None:
        self._own: dict[str, fx.GraphModule] = {}

    def of(self, node: fx.Node, given: Iterable[fx.Node], autocast: Sequence[torch.autocast]) -> fx.GraphModule | None:
        """Return what a node asks of ATen, before autograd and autocast, as a graph over the nodes that it is given.

        The calls have the results that they have under the contexts of autocast. None where torch cannot trace them.
        """
        examples = [each.meta.get(EXAMPLE) for each in given]
        places = iter(range(len(examples)))
        flat, tree = pytree.tree_flatten((node.args, node.kwargs), is_leaf=is_node)
        numbered = [next(places) if isinstance(part, fx.Node) else None for part in flat]
        contexts = [(each.device, each.fast_dtype, each._enabled) for each in autocast]
        given_as = [_signature(example) for example in examples]
        constants = [part for part in flat if not isinstance(part, fx.Node)]
        # a tensor that is given twice is one in the fragment: x * x is none for x * y
        same = [next(first for first, other in enumerate(examples) if other is each) for each in examples]
        key = repr((str(node.target), node.op, contexts, numbered, constants, tree, given_as, same))
        if key in self._own:
            return self._own[key]
        shares = is_torchs(node) and all(map(_is_plain, examples)) and all(map(is_number, constants))
        shared_key = (node.target, key, _state())
        found = _kept(shared_key) if shares else None
        if found is None:
            if not all(isinstance(example, Tensor) for example in examples):
                return None

            def called(*tensors: Tensor) -> Any:
                parts = [part if place is None else tensors[place] for part, place in zip(flat, numbered, strict=True)]
                args, kwargs = pytree.tree_unflatten(parts, tree)
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                return node.target(*args, **kwargs)  # type: ignore[operator]

            try:
                with ExitStack() as entered:
                    entered.enter_context(_constants_allowed(examples))
                    for context in autocast:
                        entered.enter_context(context)
                    found = make_fx(called, pre_dispatch=True)(*examples)
            except Exception:  # whatever a function does that cannot be traced
                return None
            if shares and _is_self_contained(found):
                _keep(shared_key, found)
        self._own[key] = found
        return found


def _kept(key: Any) -> fx.GraphModule | None:
    with _lock:
        if key in _shared:
            _shared.move_to_end(key)
        return _shared.get(key)


def _keep(key: Any, fragment: fx.GraphModule) -> None:
    """Keep a fragment for other graphs, with examples that hold nothing of the graph that it was traced for."""
    for node in fragment.graph.nodes:
        node.meta = {"val": pytree.tree_map_only(Tensor, _example_like, node.meta["val"])} if "val" in node.meta else {}
    with _lock:
        _shared[key] = fragment
        while len(_shared) > MOST:
            _shared.popitem(last=False)


def _is_self_contained(fragment: fx.GraphModule) -> bool:
    """Say whether a fragment has no constants, and tensors of fixed extents as examples."""
    values = [part for node in fragment.graph.nodes for part in pytree.tree_leaves(node.meta.get("val"))]
    return all(_is_plain(part) or isinstance(part, NUMBERS) for part in values) and all(
        node.op != "get_attr" for node in fragment.graph.nodes
    )


def _example_like(example: Tensor) -> Tensor:
    with _examples:
        return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)


def _is_plain(example: Any) -> bool:
    return (
        type(example) is FakeTensor
        and example.layout == torch.strided
        and all(type(number) is int for number in (*example.shape, *example.stride()))
        and not (example.is_conj() or example.is_neg() or example.is_quantized)
    )


def autocast_outside() -> list[tuple[str, torch.dtype]]:
    """Return the devices, and the types, of the autocast that a graph is compiled under."""
    types = torch._C._autocast_supported_devices()
    return [(each, torch.get_autocast_dtype(each)) for each in types if torch.is_autocast_enabled(each)]


def _state() -> tuple[Any, ...]:
    """Return the settings of torch that decide, besides its operands, what a function asks of ATen."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), *autocast_outside(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.mha.get_fastpath_enabled(),
    )  # fmt: skip


@contextmanager
def _constants_allowed(examples: Iterable[Any]) -> Iterator[None]:
    """Let a call mix tensors without memory with constants that it makes itself."""
    modes = {example.fake_mode for example in examples if isinstance(example, FakeTensor)}
    before = [(mode, mode.allow_non_fake_inputs) for mode in modes]
    try:
        for mode in modes:
            mode.allow_non_fake_inputs = True
        yield
    finally:
        for mode, allowed in before:
            mode.allow_non_fake_inputs = allowed


def _signature(example: Any) -> Any:
    if not isinstance(example, Tensor):
        return type(example).__name__
    return tuple(example.shape), example.dtype, example.device, example.stride(), example.requires_grad
