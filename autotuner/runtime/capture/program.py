"""A program in operators of ours, as it is read: tensors, views of them, and operators, all over axes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from autotuner.ir.records import Scalar
from autotuner.runtime.capture.axes import Axis, Dim, UnknownError, whole

Fixed = tuple[tuple[Axis, int], ...]
"""Axes along which one place is taken, and which."""
Renamed = tuple[tuple[Axis, Axis], ...]
"""Axes of a tensor, and those that an operator binds to them."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A call that computes a tensor from others, outside of all regions: `function(*of, *arguments, dtype)`."""

    function: Callable[..., Tensor]
    of: "tuple[TensorValue, ...]"
    arguments: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class TensorValue:
    """A tensor of the program.

    Args:
        dims: its dimensions, in the order of its memory.
        dtype: as torch names it.
        node: where it comes from, if no operator makes it; of several, the first.
        parameter: whether it is a parameter of the model.
        computed: how it is computed from its node, where it is not the node itself.
        places: how many places there are, where it holds places that a choice has found; 0 where it holds none.
    """

    dims: tuple[Dim, ...]
    dtype: str
    node: Any = None
    parameter: bool = False
    made_by: "Operation | None" = None
    computed: "Computed | None" = None
    places: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class View:
    """A tensor as the program sees it: dimensions over its axes, of which some are fixed, and some only repeated."""

    tensor: TensorValue
    dims: tuple[Dim, ...]
    fixed: Fixed = ()

    @property
    def dtype(self) -> str:
        return self.tensor.dtype


Taken = tuple[TensorValue, frozenset[tuple[Axis, int]]]
"""A tensor, at fixed places along some of its axes."""


@dataclass(frozen=True, eq=False, slots=True)
class BoundView:
    """A view that an operator reads, with the axes that the operator binds to the view's own."""

    view: View
    renamed: Renamed = ()


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A call of a layer: a module with a number.

    Args:
        family: its path with `*` for the number.
        of: its class; "" where only parts of it are called.
        path: of the module.
        call: which call of it, where there are several.
    """

    family: str
    of: str
    path: str
    call: str = ""

    @property
    def kin(self) -> tuple[str, str]:
        """The same for layers that are alike."""
        return self.family, self.of


@dataclass(eq=False, slots=True)
class Operation:
    """An operator over axes. `place` is that of the node that asked for it; `stage` counts strange parts before it.

    `layers` are those that it is in, outermost first.

    Attributes whose value is an axis name it in the operator's spec. An operator that stands for calls that no rule
    reads has the `places` of their nodes, and the `flop` of the products among them.
    """

    kind: str
    inputs: tuple[BoundView, ...]
    outputs: tuple[TensorValue, ...]
    attributes: Mapping[str, Scalar | Axis]
    place: int = 0
    stage: int = 0
    places: frozenset[int] = frozenset()
    flop: int = 0
    layers: tuple[LayerCall, ...] = ()


def source_of(tensor: TensorValue) -> TensorValue:
    """Return the tensor that others are only casts of."""
    while tensor.made_by is not None and tensor.made_by.kind == "cast":
        tensor = tensor.made_by.inputs[0].view.tensor
    return tensor


@dataclass(frozen=True, eq=False, slots=True)
class Expression:
    """A part of an operator of ours: some nodes compute it, and together with others they make the operator."""

    name: str
    operands: tuple[Any, ...] = ()


def renaming(operand: BoundView) -> dict[Axis, Axis]:
    """Return the axes that an operator binds to those of its operand, by the operand's.

    Raises:
        UnknownError: a dimension is split in two ways.
    """
    found: dict[Axis, Axis] = {}
    for one, other in operand.renamed:
        mine, theirs = whole([one]), whole([other])
        if [axis.extent for axis in mine] != [axis.extent for axis in theirs]:
            raise UnknownError("two of its dimensions are split in different ways")
        found |= dict(zip(mine, theirs, strict=True))
    return found


def taken_of(operand: BoundView, places: Mapping[Axis, int]) -> frozenset[tuple[Axis, int]]:
    """Return where an operand's tensor is taken, if its operator's results are taken at these places."""
    names = renaming(operand)
    found = fixed_of(operand.view.fixed)
    for axis in whole(axis for dim in operand.view.tensor.dims for axis in dim):
        bound = names.get(axis, axis)
        if bound in places and axis not in found:
            found[axis] = places[bound]
    return frozenset(found.items())


def taken_by(view: View) -> Taken:
    """Return what a view shows of its tensor."""
    return view.tensor, frozenset(fixed_of(view.fixed).items())


def fixed_of(fixed: Fixed) -> dict[Axis, int]:
    """Return places by whole axis; one along an axis that was split later is one along each of its parts."""
    found = {}
    for axis, place in fixed:
        for part in reversed(whole([axis])):
            place, found[part] = divmod(place, part.extent)
    return found


def product_flop(operation: Operation) -> int:
    """Return the flop of a product, or of those inside of a program; 0 of any other operator."""
    if operation.kind != "contraction":
        return operation.flop
    (made,), (a, b) = operation.outputs, operation.inputs
    axes = {axis for dim in made.dims for axis in whole(dim)}
    for operand in (a, b):
        names = dict(operand.renamed)
        taken = {axis for axis, _ in operand.view.fixed for axis in whole([axis])}
        own = (axis for dim in operand.view.tensor.dims for axis in whole(dim) if axis not in taken)
        axes |= {each for axis in own for each in whole([names.get(axis, axis)])}
    return 2 * prod(axis.extent for axis in axes)
