"""Storage formats: bytes, encoding, numerics and tensors of each, declared in one table.

A form writes its format behind a colon, "bnqk:bit"; one without a colon is raw. Everything that other packages ask of
a format stands here, so that a new one is a declaration, the kernels that write and read it, and its test.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import prod
from typing import Literal

from autotuner.errors import LayoutError

Length = Callable[[Sequence[int]], int]
Numerics = Literal["exact", "rounded", "8-bit"]

BITS = 8
"""Bits of a byte: elements that one byte holds where each is a bit, the first in its lowest bit."""
STORAGE_BYTES: Mapping[str, int] = {"bool": 1, "uint8": 1, "int64": 8}
"""Bytes of one element of the types that storage formats bring along."""


@dataclass(frozen=True, slots=True)
class StorageFormat:
    """Declaration of a storage format.

    Args:
        name: as forms write it; lower-case letters.
        element: type of what is stored, as torch names it; "" for that of the tensor.
        length: elements that are stored of a tensor, given its extents in memory order, slowest first. Such a format is
            flat: it has one axis of its own, and no strides. None where each element of the tensor has one of its own,
            with strides.
        operands: which tensors may have it, by operator kind: places among the inputs and then the outputs. A tensor
            may where whoever makes and reads it as stored does so at such a place; {} stands for any tensor.
        meaning: formats of one meaning decode to equal tensors; "" where it depends on the form, as of a seed.
        numerics: what a plan with it computes: "exact" as without it, rounded to a narrower type, or in 8 bits. Search
            spaces have exact ones only.
        projects: what it decodes to differs from what was encoded, and is as good at the places of `operands`.
        encode, decode: dotted paths of the reference, as `autotuner.kernels.torch.formats` describes it:
            (values, form, tensor, p, seed) -> stored, and (stored, form, tensor, p) -> values.
        fused: both are element-wise work that the generic compiler fuses with the operators of a kernel.
        for_memory: tried only where memory is to be saved, since elsewhere it costs time.
        in_memory: something is stored.
    """

    name: str
    element: str = ""
    length: Length | None = None
    _: KW_ONLY
    operands: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    meaning: str = ""
    numerics: Numerics = "exact"
    projects: bool = False
    encode: str = ""
    decode: str = ""
    fused: bool = False
    for_memory: bool = False
    in_memory: bool = True

    @property
    def is_flat(self) -> bool:
        """True where it has no strides."""
        return self.length is not None

    @property
    def is_of_masks(self) -> bool:
        """True where only dropout masks may have it; from and to a raw one, elements are scaled by their p."""
        return self.operands is _MASKS

    @property
    def has_bits(self) -> bool:
        """True where memory holds one bit for each element, in memory order."""
        return self.length is _bits

    def admits(self, kind: str, place: int) -> bool:
        """Tell whether an operand of an operator may be stored so; `place` counts inputs and then outputs."""
        return not self.operands or place in self.operands.get(kind, ())

    def is_offered(self, saving: bool) -> bool:
        """Tell whether a search space has it; `saving` says that memory is to be saved."""
        return self.numerics == "exact" and (saving or not self.for_memory)


def _bits(extents: Sequence[int]) -> int:
    return -(-prod(extents) // BITS)


def _words(count: int) -> Length:
    return lambda _extents: count


_ENCODINGS = "autotuner.kernels.torch.formats"
_LIBRARIES = "autotuner.kernels.torch.attention_masks"
_MASKS: Mapping[str, tuple[int, ...]] = {"dropout_mask": (0,), "dropout": (1,)}

FORMATS: Mapping[str, StorageFormat] = {
    each.name: each
    for each in (
        StorageFormat("raw", meaning="values", encode=f"{_ENCODINGS}:to_raw", decode=f"{_ENCODINGS}:as_it_is"),
        StorageFormat("byte", "bool", operands=_MASKS, meaning="keeps", encode=f"{_ENCODINGS}:to_bytes",
                      decode=f"{_ENCODINGS}:as_it_is"),
        StorageFormat("bit", "uint8", _bits, operands=_MASKS, meaning="keeps", encode=f"{_ENCODINGS}:to_bits",
                      decode=f"{_ENCODINGS}:from_bits"),
        StorageFormat("seed", "int64", _words(1), operands=_MASKS, encode=f"{_ENCODINGS}:made_up",
                      decode=f"{_ENCODINGS}:from_seed", for_memory=True),
        # The states of libraries' generators: seed, or seed and offset.
        *(
            StorageFormat(library, "int64", _words(count), operands=_MASKS, encode=f"{_ENCODINGS}:made_up",
                          decode=f"{_LIBRARIES}:from_state")
            for library, count in (("flash", 2), ("cudnn", 1), ("efficient", 2))
        ),
        # Whether an element is above 0, which is all that ReLU's gradient reads of ReLU's result.
        StorageFormat("sign", "uint8", _bits, operands={"relu": (1,), "relu_grad": (1,)}, meaning="signs",
                      encode=f"{_ENCODINGS}:to_signs", decode=f"{_ENCODINGS}:from_signs",
                      projects=True, fused=True, for_memory=True),
        StorageFormat("absent", in_memory=False),
    )
}  # fmt: skip

RAW, ABSENT = "raw", "absent"
FUSED = tuple(each.name for each in FORMATS.values() if each.fused)
FLAT = tuple(each.name for each in FORMATS.values() if each.is_flat)
STRIDED_OF_MASKS = tuple(each.name for each in FORMATS.values()
                         if each.in_memory and not each.is_flat and each.operands in ({}, _MASKS))  # fmt: skip
"""Formats in which a kernel that goes by strides takes a dropout mask."""


def format_of(name: str) -> StorageFormat:
    """Return the storage format of a name.

    Raises:
        LayoutError: no such format.
    """
    if name not in FORMATS:
        *known, last = FORMATS
        raise LayoutError(f"{name!r} is no storage format: write {', '.join(known)} or {last}")
    return FORMATS[name]
