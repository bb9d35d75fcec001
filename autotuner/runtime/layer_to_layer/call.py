"""A call of a layer that forgets its graph, and is made again in backward, where its outputs have gradients."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autotuner.errors import InputError
from autotuner.runtime.devices import DeviceRuntime
from autotuner.runtime.devices.protocol import in_state


@dataclass(frozen=True)
class AutocastState:
    """Autocast of a device, and of the CPU, as it is where this is made.

    Weights are not kept in the lower type: torch would keep those of all layers until autocast is left.
    """

    states: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls, device_type: str) -> "AutocastState":
        kinds = sorted({device_type, "cpu"})
        return cls(tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds))

    def is_of(self, dtype: torch.dtype, device_type: str) -> bool:
        """Say whether autocast of a device is on, with a type."""
        return (device_type, True, dtype) in self.states

    def again(self) -> AbstractContextManager[Any]:
        """Return a context with that autocast."""
        stack = ExitStack()
        if torch.is_autocast_cache_enabled():  # a layer may have autocast of its own, where this is off
            torch.set_autocast_cache_enabled(False)
            stack.callback(torch.set_autocast_cache_enabled, True)
        for kind, is_on, dtype in self.states:
            if is_on or torch.is_autocast_enabled(kind) or dtype != torch.get_autocast_dtype(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on, cache_enabled=False))
        return stack


CHANGES_INPUT = (
    "{} changes its input in place, and layer to layer runs each layer twice on the same one: write the result into a "
    "new tensor (inplace=False)"
)
LEAKS = (
    "a tensor that {} has made reaches the loss otherwise than as an output of that layer, such as by an attribute or "
    "a hook: layer to layer, each layer runs again by itself, so return it"
)


class _Cut(torch.autograd.Function):
    """Outputs of a layer without its graph: backward notes their gradients, and goes no further."""

    @staticmethod
    def forward(ctx: Any, note: Callable[..., None], _: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.note = note
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)  # which the caller may write to

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.note(gradients)
        return None, None, None


@dataclass
class Inputs:
    """Arguments of a call of a layer, taken apart.

    Args:
        leaves: tensors without their graphs, and all else.
        spec: of the arguments.
        edges: where the gradients of those go that want one, by place among the leaves.
        same: places of tensors that are given once more, with the first place of each.
        versions: of the tensors, which change where somebody writes to them.
    """

    leaves: list[Any]
    spec: TreeSpec
    edges: dict[int, GradientEdge]
    same: dict[int, int]
    versions: dict[int, int]

    @classmethod
    def of(cls, name: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> "tuple[Inputs, list[Any]]":
        """Take the arguments of a layer apart, and return the leaves as they were given, too.

        Raises:
            InputError: keys and values of an earlier call are among them, or objects that hold tensors of a graph.
        """
        given = tuple(emptied(each) for each in arguments), {key: emptied(each) for key, each in keywords.items()}
        leaves, spec = tree_flatten(given)
        check_objects(f"{name} is given", leaves)
        first: dict[int, int] = {}
        tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        same = {place: first[id(leaf)] for place, leaf in tensors.items() if first.setdefault(id(leaf), place) != place}
        edges = {
            place: get_gradient_edge(leaf)
            for place, leaf in tensors.items() if leaf.requires_grad and place not in same
        }  # fmt: skip
        kept = [
            None if place in same else leaf.detach() if isinstance(leaf, Tensor) else leaf
            for place, leaf in enumerate(leaves)
        ]
        made = cls(kept, spec, edges, same, {})
        made.note_versions()
        return made, leaves

    def note_versions(self) -> None:
        """Note what the tensors are now."""
        self.versions = {place: leaf._version for place, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)}

    def check_unchanged(self, name: str) -> None:
        """Check that nobody has written to the tensors.

        Args:
            name: of the layer.

        Raises:
            InputError: somebody has.
        """
        leaves = self.leaves
        if any(
            isinstance(leaves[place], Tensor) and leaves[place]._version != of for place, of in self.versions.items()
        ):
            raise InputError(
                f"what {name} was given was changed in place after the call, and layer to layer runs each layer twice "
                "on it: write the result into a new tensor (x = x + y in place of x += y)"
            )

    def from_layers(self) -> list[int]:
        """Return the places of leaves that another layer has made."""
        return [place for place, edge in self.edges.items() if isinstance(edge.node, _Cut._backward_cls)]

    def arguments(self) -> tuple[list[Any], tuple[Any, ...], dict[str, Any]]:
        """Return leaves that begin a graph of their own, and the arguments that they are in."""
        leaves = [
            leaf.detach().requires_grad_(place in self.edges) if isinstance(leaf, Tensor) else leaf
            for place, leaf in enumerate(self.leaves)
        ]
        for place, first in self.same.items():  # a layer may ask whether two are one
            leaves[place] = leaves[first]
        arguments, keywords = tree_unflatten(leaves, self.spec)
        return leaves, arguments, keywords


@dataclass
class RepeatedCall:
    """A call of a layer for one micro-batch.

    Args:
        name: of the layer.
        inputs: of the call.
        context: variables of the caller's context before it.
        drawn: states of the generators of the host and the device before it.
        autocast: in the call.
        places: which of the outputs have a gradient.
        gradients: of these outputs, as far as they have come.
    """

    name: str
    inputs: Inputs
    context: Context
    drawn: tuple[Tensor, Any]
    autocast: AutocastState
    places: tuple[int, ...] = ()
    gradients: list[Tensor | None] = field(default_factory=list)

    def note(self, found: Sequence[Tensor | None]) -> None:
        """Add gradients of the outputs."""
        for place, gradient in enumerate(found):
            if gradient is not None:
                before = self.gradients[place]
                self.gradients[place] = gradient if before is None else before + gradient


def called_once(
    name: str,
    forward: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: dict[str, Any],
    autocast: AutocastState,
    runtime: DeviceRuntime,
    slots: Collection[int] = (),
) -> tuple[Any, RepeatedCall]:
    """Call a layer, and return its outputs, without its graph, and the call, which can be made again.

    Args:
        name: of the layer.
        autocast: in which it is called.
        slots: addresses of memory that other weights will be in: what lies there is handed out as a copy.

    Raises:
        InputError: the layer changes what it is given, or returns tensors of a graph in an object of some class.
    """
    inputs, given = Inputs.of(name, arguments, keywords)
    leaves, positional, named = inputs.arguments()
    versions = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
    for place in inputs.edges:
        leaves[place].register_hook(partial(_refuse_leak, name))
    context, on_host = copy_context(), torch.get_rng_state()
    try:
        with runtime.noted_draws() as drawn, torch.enable_grad(), autocast.again():
            outputs, spec = tree_flatten(forward(*positional, **named))
    except RuntimeError as error:
        if "is being used in an in-place operation" in str(error):
            raise InputError(CHANGES_INPUT.format(name)) from error
        raise
    if versions != [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]:
        raise InputError(CHANGES_INPUT.format(name))
    after, spec_after = tree_flatten((positional, named))
    if spec_after != inputs.spec or any(one is not other for one, other in zip(leaves, after, strict=True)):
        raise InputError(
            f"{name} changes a list or mapping that it is given, and layer to layer calls it with one of its own: "
            "return what it adds"
        )
    check_objects(f"{name} returns", outputs)
    call = RepeatedCall(name, inputs, context, (on_host, drawn), autocast)
    handed: list[Any] = []
    of_graph: list[int] = []
    for place, output in enumerate(outputs):
        source = next((i for i, leaf in enumerate(leaves) if leaf is output), None)
        if source is not None:
            handed.append(given[source])
        elif isinstance(output, Tensor):
            lies_in_slot = output.untyped_storage().data_ptr() in slots
            handed.append(output.detach().clone() if lies_in_slot else output.detach())
            if output.requires_grad:
                of_graph.append(place)
        else:
            handed.append(output)
    if of_graph:
        call.places, call.gradients = tuple(of_graph), [None] * len(of_graph)
        anchor = torch.zeros((), requires_grad=True)
        cut = _Cut.apply(call.note, anchor, [handed[place] for place in of_graph])  # type: ignore[no-untyped-call]
        for place, tensor in zip(of_graph, cut, strict=True):
            handed[place] = tensor
    return tree_unflatten(handed, spec), call


def _refuse_leak(name: str, _: Tensor) -> None:
    raise InputError(LEAKS.format(name))


def repeated(forward: Callable[..., Any], call: RepeatedCall, runtime: DeviceRuntime) -> tuple[list[Any], list[Any]]:
    """Make a call again, and return its leaves and its outputs, with their graph; generators are put back."""
    call.inputs.check_unchanged(call.name)
    leaves, arguments, keywords = call.inputs.arguments()
    on_host, drawn = call.drawn
    with (
        torch.enable_grad(), in_state(torch.default_generator, on_host), runtime.draws_again(drawn),
        call.autocast.again(),
    ):  # fmt: skip
        return leaves, tree_flatten(call.context.copy().run(forward, *arguments, **keywords))[0]


def called_again(forward: Callable[..., Any], call: RepeatedCall, runtime: DeviceRuntime) -> dict[int, Tensor]:
    """Make a call again, run backward through it, and let go of it.

    Returns:
        Gradients of the inputs that want one, by place among the leaves; those of parameters are theirs.
    """
    leaves, outputs = repeated(forward, call, runtime)
    wanted = [(outputs[p], g) for p, g in zip(call.places, call.gradients, strict=True) if g is not None]
    call.inputs.leaves.clear()
    call.gradients.clear()
    torch.autograd.backward([output for output, _ in wanted], [gradient for _, gradient in wanted])
    return {place: leaves[place].grad for place in call.inputs.edges if leaves[place].grad is not None}


def check_objects(what: str, leaves: Sequence[Any]) -> None:
    """Check that no tensor of a graph is in an object that is not looked into.

    Raises:
        InputError: one is.
    """
    for leaf in leaves:
        if isinstance(leaf, Tensor | nn.Module | type) or not hasattr(leaf, "__dict__"):
            continue
        held = tree_flatten(dict(vars(leaf)))[0]
        if any(isinstance(each, Tensor) and each.requires_grad for each in held):
            raise InputError(
                f"{what} a {type(leaf).__name__} that holds tensors, whose gradients would be lost layer to layer: "
                "take tensors, or tuples, lists and dicts of them"
            )


def emptied(argument: Any) -> Any:
    """Return an argument, or None in place of an empty cache of keys and values: a call made again would fill it twice.

    Raises:
        InputError: a cache that is not empty.
    """
    length = getattr(argument, "get_seq_length", None)
    if length is None or not hasattr(argument, "update"):
        return argument
    if int(length()):
        raise InputError("a layer is given keys and values of an earlier call: layer to layer, train without a cache")
    return None
