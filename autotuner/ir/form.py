"""Axes, layouts and forms: the place of a tensor's elements in memory."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from string import ascii_letters

from autotuner.errors import LayoutError
from autotuner.ir import formats
from autotuner.ir.formats import RAW, StorageFormat, format_of

Extents = Mapping[str, int]

STACK_AXIS = "*"
_FORM = re.compile(
    r"(?P<layout>[a-zA-Z*]*)(:(?P<storage>[a-z]+[0-9]*))?(@(?P<index>\d+)/(?P<count>\d+)(#(?P<group>[\w.+]+))?)?"
)


@dataclass(frozen=True, order=True, slots=True)
class Layout:
    """A memory order of named axes, slowest first: "bhk" keeps `k` contiguous."""

    axes: str

    def __post_init__(self) -> None:
        letters = self.axes.replace(STACK_AXIS, "", 1)
        if len(set(letters)) != len(letters) or not set(letters) <= set(ascii_letters):
            raise LayoutError(f"{self.axes!r} is no layout: write each axis once, as one of a-z or A-Z")

    def strides(self, extents: Extents) -> dict[str, int]:
        """Return the distance, in elements, between neighbours along each axis.

        >>> Layout("lbh").strides({"b": 4, "l": 64, "h": 128})
        {'h': 1, 'b': 128, 'l': 512}
        """
        strides: dict[str, int] = {}
        step = 1
        for axis in reversed(self.axes):
            strides[axis] = step
            step *= extents[axis]
        return strides


@dataclass(frozen=True, order=True, slots=True)
class Stack:
    """The place of a tensor among those that share one buffer along a stacking axis.

    `group` names the members in order, joined by "+"; it is empty in name-free records.
    """

    index: int
    count: int
    group: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise LayoutError(f"slice {self.index} of a stack of {self.count}: the index must be below the count")


@dataclass(frozen=True, slots=True)
class Stored:
    """Memory that holds a tensor: a view of a buffer, in elements of a type as torch names it.

    A flat storage format has one axis of its own.
    """

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True, order=True, slots=True)
class Form:
    """Existence of a tensor in memory: a layout, a storage format, and its place in a stack if it is a slice.

    Written "blh", "bnqk:byte", "bl*np@1/3#query+key+value" (slice 1 of 3, `*` is the stacking axis) or "absent":
    not materialised, because a fused kernel keeps the value inside. `autotuner.ir.formats` declares the storage
    formats: a dropout mask may be stored as bytes, as bits, or as the seed from which a generator makes it again in the
    layout's memory order.
    """

    layout: Layout
    storage: str = RAW
    stack: Stack | None = None

    def __post_init__(self) -> None:
        if format_of(self.storage).is_flat and self.stack is not None:
            strided = " or ".join(formats.STRIDED_OF_MASKS)
            raise LayoutError(f"a slice of a stack cannot be stored as a {self.storage}: write {strided}")
        if (STACK_AXIS in self.layout.axes) != (self.stack is not None):
            raise LayoutError(f"{self.layout.axes!r}: a stacking axis `*` and a slice `@index/count` go together")

    @classmethod
    @lru_cache(maxsize=1 << 16)  # a space has a few hundred texts, and reads them a hundred thousand times
    def parse(cls, text: str) -> "Form":
        """Read a form from its text; see the class for the grammar.

        >>> form = Form.parse("bl*np@1/3#query+key+value")
        >>> form.layout.axes, form.storage, form.stack.index, form.stack.count
        ('bl*np', 'raw', 1, 3)
        >>> str(Form.parse("bnqk:bit"))
        'bnqk:bit'
        """
        if text == formats.ABSENT:
            return ABSENT
        match = _FORM.fullmatch(text)
        if match is None:
            raise LayoutError(f'{text!r} is no form: write a layout like "blh", with ":byte" or "@1/3" if it applies')
        index, count = match["index"], match["count"]
        stack = Stack(int(index), int(count), match["group"] or "") if index is not None else None
        return cls(Layout(match["layout"]), match["storage"] or RAW, stack)

    def __str__(self) -> str:
        if self.is_absent:
            return self.storage
        storage = "" if self.is_raw else f":{self.storage}"
        stack = f"@{self.stack.index}/{self.stack.count}" if self.stack else ""
        group = f"#{self.stack.group}" if self.stack and self.stack.group else ""
        return f"{self.layout.axes}{storage}{stack}{group}"

    @property
    def format(self) -> StorageFormat:
        """The declaration of the storage format."""
        return format_of(self.storage)

    @property
    def is_raw(self) -> bool:
        """True where elements are stored in the tensor's own type."""
        return self.storage == RAW

    @property
    def is_absent(self) -> bool:
        """True where nothing is stored."""
        return not self.format.in_memory

    @property
    def is_flat(self) -> bool:
        """True where the storage format has no strides."""
        return self.format.is_flat

    def in_format(self, storage: str) -> "Form":
        """Return the same layout in another storage format."""
        return Form(self.layout, storage, self.stack)

    def renamed(self, old: str, new: str) -> "Form":
        """Return this form with each axis of `old` written as the one at the same place in `new`."""
        return Form(Layout(self.layout.axes.translate(str.maketrans(old, new))), self.storage, self.stack)

    def nameless(self) -> "Form":
        """Return this form without the names of its stack's members."""
        return Form(self.layout, self.storage, self.stack and Stack(self.stack.index, self.stack.count))

    def placed(self, axes: str, extents: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
        """Return strides in the order of `axes`, offset and buffer length, all in elements.

        Args:
            axes: the tensor's declared axes, e.g. "blh".
            extents: elements along each of them.

        Raises:
            LayoutError: this form's axes are not a permutation of `axes`, or it has no strides.

        >>> Form.parse("bl*np@1/3").placed("blnp", (4, 64, 4, 32))
        ((24576, 384, 32, 1), 128, 98304)
        """
        return _placed(self, axes, extents)

    def stored(self, dtype: str, axes: str, extents: tuple[int, ...]) -> Stored:
        """Return what memory holds of a tensor in this form: bytes and where they are follow from it alone.

        Args:
            dtype: the element type of the tensor's values.
            axes: its declared axes.
            extents: elements along each of them.

        Raises:
            LayoutError: this form's axes are not a permutation of `axes`, or it is absent.
        """
        declared = self.format
        if declared.length is not None:
            self._must_permute(axes)
            sizes = dict(zip(axes, extents, strict=True))
            length = declared.length([sizes[axis] for axis in self.layout.axes])
            return Stored(declared.element, (length,), (1,), 0, length)
        if not declared.in_memory:
            raise LayoutError("an absent tensor is not stored")
        strides, offset, length = self.placed(axes, extents)
        return Stored(declared.element or dtype, extents, strides, offset, length)

    def _must_permute(self, axes: str) -> None:
        if sorted(self.layout.axes.replace(STACK_AXIS, "")) != sorted(axes):
            raise LayoutError(f"form {self} does not fit a tensor with axes {axes!r}: it must permute them")


@lru_cache(maxsize=1 << 14)  # every rule asks, of a few tensors in a few hundred forms
def _placed(form: Form, axes: str, extents: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    form._must_permute(axes)
    if form.is_flat:
        raise LayoutError(f"form {form} has no strides: a {form.storage} is read by kernels that know it")
    sizes = dict(zip(axes, extents, strict=True))
    if form.stack:
        sizes[STACK_AXIS] = form.stack.count
    strides = form.layout.strides(sizes)
    offset = form.stack.index * strides[STACK_AXIS] if form.stack else 0
    return tuple(strides[axis] for axis in axes), offset, prod(sizes.values())


@lru_cache(maxsize=1 << 16)
def local_form(text: str, axes: str, letters: str) -> str:
    """Return a form's text without the names of its stack's members, with each of `axes` as its letter.

    >>> local_form("nph*@1/3#query+key+value", "nph", "abc")
    'abc*@1/3'
    """
    return str(Form.parse(text).nameless().renamed(axes, letters))


ABSENT = Form(Layout(""), formats.ABSENT)
