"""Axes of tensors in a program that views, splits and merges dimensions.

A dimension is a product of axes, slowest first. Reading a program finds out what they are: a view that makes 16 heads
of 1,024 features splits an axis in two, a sum of two tensors says that their axes are the same.

Everything here ends. A whole axis has 2 elements or more, and is split into parts of 2 or more, so it takes fewer
splits than its extent has binary digits, and parts are nested no deeper. An axis is found to be the same as another one
only where both are whole and not one, so there is no circle.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from autotuner.errors import AutotunerError


class UnknownError(AutotunerError):
    """A part of a program cannot be said in operators of ours; the message says which part, and why."""


@dataclass(eq=False, slots=True)
class Axis:
    """An axis of some extent: whole, or split into parts, or the same as another one.

    `free` until it is found to be the same as one that another tensor has. One that an attention runs along is `kept`
    whole: what a model does to its positions behind all layers is no reason to lose them. A part knows what it is `of`.
    """

    extent: int
    free: bool = True
    kept: bool = False
    parts: "tuple[Axis, Axis] | None" = None
    same: "Axis | None" = None
    of: "Axis | None" = None


Dim = tuple[Axis, ...]
"""One dimension. That of extent 1 has no axes."""


@dataclass
class Axes:
    """The knowledge about axes, with a journal, so that it can be taken back."""

    _journal: list[tuple[Axis, str, object]] = field(default_factory=list)

    def mark(self) -> int:
        return len(self._journal)

    def take_back(self, mark: int) -> None:
        """Forget what was found since a mark."""
        while len(self._journal) > mark:
            axis, name, value = self._journal.pop()
            setattr(axis, name, value)

    def _set(self, axis: Axis, name: str, value: object) -> None:
        self._journal.append((axis, name, getattr(axis, name)))
        setattr(axis, name, value)

    def split(self, axis: Axis, slow: int) -> None:
        """Split a whole axis into a slow part of this extent and a fast one.

        Raises:
            UnknownError: the extent is no divisor of the axis's, or one of the parts would have one element, or the
                axis is kept whole.
        """
        if axis.kept:
            raise UnknownError(f"an axis of {axis.extent} that attention runs along would be split")
        if slow in (0, 1, axis.extent) or axis.extent % slow:
            raise UnknownError(f"an axis of {axis.extent} cannot be split into {slow} parts")
        parts = Axis(slow, axis.free, of=axis), Axis(axis.extent // slow, axis.free, of=axis)
        self._set(axis, "parts", parts)

    def keep(self, axes: Iterable[Axis]) -> None:
        """Have axes stay whole from now on."""
        for axis in whole(axes):
            if not axis.kept:
                self._set(axis, "kept", True)

    def pairs(self, one: Iterable[Axis], other: Iterable[Axis]) -> list[tuple[Axis, Axis]]:
        """Return the whole axes of two dimensions that stand for each other, split as far as that takes.

        Raises:
            UnknownError: they have other extents, or cannot be split alike.
        """
        first, second = whole(one), whole(other)
        if extent(first) != extent(second):
            raise UnknownError(f"dimensions of {extent(first)} and {extent(second)} elements do not go together")
        found = []
        while first and second:  # each turn takes a pair away, or splits an axis
            a, b = first[0], second[0]
            if a.extent == b.extent:
                found.append((a, b))
                del first[0], second[0]
                continue
            larger, smaller = (a, b) if a.extent > b.extent else (b, a)
            self.split(larger, smaller.extent)
            first, second = whole(first), whole(second)  # either may have the axis further behind
        return [(one, other) for a, b in found for one, other in zip(whole([a]), whole([b]), strict=True)]

    def unite(self, one: Iterable[Axis], other: Iterable[Axis]) -> list[tuple[Axis, Axis]]:
        """Find that two dimensions are the same.

        Returns:
            Renamings, from an axis of the other to one of the first, where both are bound already: an operator may bind
            its own axes to those of its operands, as attention does where positions meet positions.

        Raises:
            UnknownError: as `pairs`, or one stands for the other crosswise, as in a sum of a matrix and its transpose.
        """
        renamed = []
        for a, b in self.pairs(one, other):
            if a is b:
                continue
            if a.same is not None or b.same is not None:
                raise UnknownError("two dimensions that stand for each other crosswise")
            if a.kept or b.kept:
                self.keep((a, b))
            if b.free:
                self._set(b, "same", a)
            elif a.free:
                self._set(a, "same", b)
            else:
                renamed.append((b, a))
                continue
            self._bind(a if b.same is a else b)
        return renamed

    def bind(self, dims: Iterable[Dim]) -> None:
        """Note that an operator has made a tensor with these dimensions."""
        for dim in dims:
            for axis in whole(dim):
                self._bind(axis)

    def _bind(self, axis: Axis) -> None:
        if axis.free:
            self._set(axis, "free", False)

    def regrouped(self, dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...]:
        """Return the dimensions of a view with another shape.

        Raises:
            UnknownError: an axis would have to be split where its extent does not allow it, or there are more elements
                or fewer.
        """
        left = whole(axis for dim in dims for axis in dim)
        if extent(left) != prod(shape):
            raise UnknownError(f"a view as {tuple(shape)} of other extents")
        found: list[Dim] = []
        for wanted in shape:
            taken: list[Axis] = []
            while extent(taken) != wanted:  # each turn takes an axis away
                missing, odd = divmod(wanted, extent(taken))
                if odd or not left:
                    raise UnknownError(
                        f"a view as {tuple(shape)} cuts an axis of {(taken or left)[-1].extent} elements"
                    )
                if left[0].extent > missing:
                    axis = left[0]
                    self.split(axis, missing)
                    left = whole(left)
                taken.append(left.pop(0))
            found.append(tuple(taken))
        return tuple(found)


def whole(axes: Iterable[Axis]) -> list[Axis]:
    """Return the axes that these are, or consist of, in order."""
    return list(_whole(axes))


def _whole(axes: Iterable[Axis]) -> Iterator[Axis]:
    for axis in axes:
        while axis.same is not None:
            axis = axis.same
        if axis.parts is None:
            yield axis
        else:
            yield from _whole(axis.parts)


def are_neighbours(one: Axis, other: Axis) -> bool:
    """Say whether two whole axes are parts of one axis, the second right behind the first."""
    root = root_of(one)
    return root is not one and (one, other) in pairwise(whole([root]))


def root_of(axis: Axis) -> Axis:
    """Return the axis that another one is a part of, or it itself where it is none."""
    while axis.of is not None:
        axis = axis.of
    return axis


def are_shuffled(dim: Iterable[Axis], memory: Sequence[Axis]) -> bool:
    """Say whether a dimension is put together from parts of two axes that a tensor has as a whole.

    So it is where an image is cut into windows: the rows of a window and its columns become one axis. Heads and their
    features, which attention has of several tensors, are none.

    Args:
        memory: the axes of the tensor, in order.
    """
    behind, held = dict(pairwise(memory)), set(memory)
    for one, other in pairwise(whole(dim)):
        roots = [root_of(one), root_of(other)]
        are_parts = one is not roots[0] and other is not roots[1] and roots[0] is not roots[1]
        if are_parts and behind.get(one) is not other and held.issuperset(whole(roots)):
            return True
    return False


def extent(axes: Iterable[Axis]) -> int:
    """Return the elements along a dimension."""
    return prod(axis.extent for axis in axes)


def fresh(shape: Iterable[int]) -> tuple[Dim, ...]:
    """Return dimensions of new axes."""
    return tuple((Axis(elements),) if elements > 1 else () for elements in shape)
