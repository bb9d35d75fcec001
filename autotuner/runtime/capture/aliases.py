"""All tensors in one storage that a graph makes and changes in place, checked to be fit for rewriting."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import grad_mode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autotuner.runtime.capture.axes import UnknownError
from autotuner.runtime.capture.calls import EXAMPLE, is_node
from autotuner.runtime.capture.changed_in_place import name_of
from autotuner.runtime.capture.functional_forms import FunctionalForm, functional_form
from autotuner.runtime.capture.placed import placed

AUTOCAST = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)

_RESHAPED = "view reshape flatten unflatten squeeze unsqueeze ravel view_as reshape_as contiguous to type type_as float"
_RESHAPED += " double half bfloat16 dropout rearrange"
_MOVED = "transpose swapaxes swapdims t permute"
_TAKEN = "getitem __getitem__ narrow select"
_OTHERS = "detach expand expand_as broadcast_to chunk split tensor_split unbind diagonal movedim moveaxis unfold"
VIEWS = frozenset(f"{_RESHAPED} {_MOVED} {_TAKEN} {_OTHERS}".split())
"""Functions and methods that return a view of their first argument, or the argument itself, and do nothing else."""


class Contexts:
    """The autocast contexts of each node, and whether gradients are recorded there."""

    def __init__(self, graph: fx.Graph, within: Iterable[fx.Node] = ()) -> None:
        """Follow a graph; `within`: the contexts that its call is in, where it is a body."""
        self.autocast: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.unrecorded: set[fx.Node] = set()
        entered: dict[fx.Node, None] = dict.fromkeys(within)
        recording = True
        inferring: set[fx.Node] = set()
        for node in graph.nodes:
            if node.target is AUTOCAST[0]:
                entered[node] = None
            elif node.target is AUTOCAST[1]:
                entered.pop(node.args[0], None)
            elif node.target is torch._C._set_grad_enabled:
                recording = bool(node.args[0])
            elif node.target is grad_mode._enter_inference_mode and node.args[0]:
                inferring.add(node)
            elif node.target is grad_mode._exit_inference_mode:
                inferring.discard(node.args[0])
            self.autocast[node] = tuple(entered)
            if inferring or not recording:
                self.unrecorded.add(node)


def autocast_of(entering: fx.Node) -> torch.autocast:
    """Return the context that a node enters."""
    return torch.autocast(*entering.args, **entering.kwargs)  # type: ignore[arg-type]


@dataclass(eq=False)
class Change:
    """A change in place.

    Args:
        dtype: what the result of the functional form is cast to, if it is of another type.
        autocast: the contexts that the call is in.
        has_effect: whether it writes other values than are there.
    """

    form: FunctionalForm
    dtype: torch.dtype | None
    autocast: tuple[fx.Node, ...]
    has_effect: bool = True


class Aliases:
    """All tensors in one storage that the graph makes, checked to be fit for rewriting.

    Attributes:
        root: the tensor that the others are views of.
        parents: of each other one, what it is a view of; of the result of a change, what is changed.
        changes: by node; assignments, which have no result, among them.
    """

    def __init__(self, storage: int, nodes: Sequence[fx.Node], where: Contexts) -> None:
        """Check the tensors of a storage; `nodes` are in order.

        Raises:
            UnknownError: they cannot be rewritten.
        """
        outside = next((node for node in nodes if not node.op.startswith("call")), None)
        if outside is not None:
            raise UnknownError(f"it is changed in place, and comes from outside of the graph, as {outside.name}")
        self.root, self.storage, self.holder = nodes[0], storage, nodes[0]
        if isinstance(nodes[0].meta[EXAMPLE], tuple | list):  # one of several results
            self.root = next((node for node in nodes if isinstance(node.meta[EXAMPLE], Tensor)), nodes[0])
            same = [user for user in self.holder.users if user.args == self.root.args]
            if {name_of(user) for user in self.holder.users} != {"getitem"} or same != [self.root]:
                raise UnknownError("it is changed in place, and one of several results of a call")
        self.parents: dict[fx.Node, fx.Node] = {}
        self.changes: dict[fx.Node, Change] = {}
        members = [node for node in nodes if node is not self.holder]
        users = {user for node in nodes for user in node.users}
        for node in sorted({*members, *users} - {self.root, self.holder}):
            self._add(node, node in members, nodes, where)
        self._check_all_is_known(nodes)
        is_assigned = all(change.form.function is placed for change in self.changes.values())
        if is_assigned and not self.root.meta[EXAMPLE].requires_grad and not _is_of_inputs(self.root):
            raise UnknownError("it is a constant, as a mask is, that assignments change in place")

    def _add(self, node: fx.Node, is_member: bool, nodes: Sequence[fx.Node], where: Contexts) -> None:
        form = functional_form(node)
        if form is not None and form.changed in nodes:
            self.changes[node] = self._change(node, form, where)
            self.parents[node] = form.changed
        elif is_member:
            given = [each for each in node.all_input_nodes if each in nodes]
            known = len(given) == 1 and given[0] is node.args[0] and (given[0] is self.root or given[0] in self.parents)
            if name_of(node) not in VIEWS or not known:
                raise UnknownError(f"it is changed in place, and {name_of(node)} returns it, or a view, and is no view")
            self.parents[node] = given[0]
        else:
            return
        if node in where.unrecorded:
            raise UnknownError("it is changed in place in a part without gradients")

    def _check_all_is_known(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            for example in pytree.tree_leaves(node.meta[EXAMPLE]):
                if not isinstance(example, FakeTensor) or example.is_inference():
                    raise UnknownError("it is changed in place")
                if any(type(extent) is not int for extent in (*example.shape, *example.stride())):
                    raise UnknownError("it is changed in place, and has sizes that are symbols")
        if self.root.meta[EXAMPLE]._version != len(self.changes):
            raise UnknownError("it is changed in place by a call that has no functional form")

    def _change(self, node: fx.Node, form: FunctionalForm, where: Contexts) -> Change:
        """Return a change, of which all results are known to be as what they replace.

        Raises:
            UnknownError: they are not.
        """
        name = name_of(node)
        wanted = form.changed.meta[EXAMPLE]
        try:
            found = called_example(form.function, form.args, form.kwargs, where.autocast[node])
            dtype = None if found.dtype == wanted.dtype else wanted.dtype
            found = found if dtype is None else found.to(dtype)
        except Exception as error:  # whatever the call does not take
            raise UnknownError(f"it is changed in place by {name}, which has no functional form here") from error
        self._check_put_back(form.changed, found, name)
        is_its_own = form.function is placed and len(form.args) == 3 and self._is_part(form.args[1], form.args[2])
        has_effect = not (is_its_own and self.of(self.parents[self.of(form.args[1])]) is self.of(form.changed))
        return Change(form, dtype, where.autocast[node], has_effect)

    def _is_part(self, value: Any, index: Any) -> bool:
        """Say whether a value is read at an index, as `x[0] += 1` puts back what it has changed already."""
        if not is_node(value) or self.of(value) not in self.parents or _has_nodes(index):
            return False
        value = self.of(value)
        return name_of(value) == "getitem" and value.args[1] == index

    def of(self, node: fx.Node) -> fx.Node:
        """Return the tensor that a change returns again, or the node itself."""
        while node in self.changes:
            node = self.parents[node]
        return node

    def _check_put_back(self, node: fx.Node, found: Any, name: str) -> None:
        """Check that what a view becomes can be put back into what it is a view of, up to the root."""
        while True:
            node = self.of(node)
            example = node.meta[EXAMPLE]
            if not isinstance(found, Tensor) or _kind(found) != _kind(example):
                raise UnknownError(f"it is changed in place by {name}, which makes something else of it")
            if node is self.root:
                break
            parent = self.parents[node]
            found = put_back(node, like_example(parent), found)
            node = parent
        if _steps(found) != _steps(example):
            raise UnknownError(f"it is changed in place by {name}, and its memory is in an order of its own")


def put_back(node: fx.Node, whole: Any, part: Any) -> Any:
    """Return a tensor of which a view was changed, given the tensor before and the view as it is then.

    It takes tensors, and also nodes of a graph through proxies.

    Raises:
        UnknownError: there is no call for that.
    """
    name = name_of(node)
    before = node.args[0].meta[EXAMPLE]  # type: ignore[union-attr]
    if not isinstance(node.meta[EXAMPLE], Tensor) or not isinstance(before, Tensor):
        raise UnknownError(f"it is changed in place, through one of several views by {name}")
    shape = tuple(before.shape)
    if name in _RESHAPED.split():
        return part.reshape(shape)
    if node.kwargs or _has_nodes(node.args[1:]):
        raise UnknownError(f"it is changed in place, through a view by {name}")
    if name in ("transpose", "swapaxes", "swapdims", "t"):
        return part.transpose(*(node.args[1:] or (-2, -1))) if len(shape) > 1 else part
    if name == "permute":
        order = [int(dim) % len(shape) for dim in pytree.tree_leaves(node.args[1:])]
        return part.permute(sorted(range(len(shape)), key=order.__getitem__))
    if name in ("getitem", "__getitem__"):
        return placed_in(whole, part, node.args[1])
    if name == "select":
        dim, place = node.args[1:]
        return placed_in(whole, part, (*[slice(None)] * (dim % len(shape)), place))  # type: ignore[operator]
    if name == "narrow":
        dim, start, length = node.args[1:]
        start += shape[dim] if start < 0 else 0  # type: ignore[operator,index]
        return placed_in(whole, part, (*[slice(None)] * (dim % len(shape)), slice(start, start + length)))  # type: ignore[operator]
    raise UnknownError(f"it is changed in place, through a view by {name}")


def placed_in(whole: Any, part: Any, index: Any) -> Any:
    """Return `placed`, as a call of a graph where it is given proxies."""
    if isinstance(whole, fx.Proxy):
        return whole.tracer.create_proxy("call_function", placed, (whole, part, index), {})
    return placed(whole, part, index)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _steps(tensor: Tensor) -> list[int]:
    """Return the strides that tell where elements are."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for extent, stride in pairs if extent != 1] if tensor.numel() else []


def like_example(node: fx.Node) -> Any:
    """Return what a node makes, with no history, so that calls on it leave no trace."""
    return pytree.tree_map_only(Tensor, lambda each: fresh_example(each, False), node.meta.get(EXAMPLE))


def fresh_example(example: Tensor, requires_grad: bool) -> Tensor:
    made = example.new_empty_strided(example.shape, example.stride())
    return made.requires_grad_(requires_grad and made.is_floating_point())


def _is_of_inputs(node: fx.Node) -> bool:
    """Say whether an input or a parameter has a part in a node."""
    seen, waiting = set[fx.Node](), [node]
    while waiting:
        each = waiting.pop()
        if not each.op.startswith("call"):
            return True
        if each not in seen:
            seen.add(each)
            waiting += each.all_input_nodes
    return False


def _has_nodes(value: Any) -> bool:
    return any(is_node(each) for each in pytree.tree_leaves(value, is_leaf=is_node))


def called_example(function: Any, args: Any, kwargs: Any, autocast: Iterable[fx.Node]) -> Any:
    """Return what a function, or the method of a name, makes of examples of its arguments."""
    args, kwargs = map_arg((args, kwargs), like_example)
    with ExitStack() as entered:
        for each in autocast:
            entered.enter_context(autocast_of(each))
        if isinstance(function, str):
            return getattr(args[0], function)(*args[1:], **kwargs)
        return function(*args, **kwargs)
