"""Storage formats: bytes, encoding, numerics and tensors of each, declared in one table.

A form writes its format behind a colon, "bnqk:bit"; one without a colon is raw. Everything that other packages ask of
a format stands here, so that a new one is a declaration, the kernels that write and read it, and its test.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import prod

from autotuner.errors import LayoutError
from autotuner.ir.numerics import Numerics, allowed_classes

Length = Callable[[Sequence[int]], int]

BITS = 8
"""Bits of a byte: elements that one byte holds where each is a bit, the first in its lowest bit."""
GROUP = 128
"""Elements, one behind the other in memory, that share the scale of their 8-bit numbers. A scale takes 4 bytes, 3 % of
what its group does."""
SCALE_BYTES = 4
LARGEST = 127
"""The largest 8-bit number; the least is the same below 0, so that 0 stays 0."""
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
            may where whoever makes and reads it as stored does so at such a place; {} stands for any tensor. Of a
            format that is not exact, they are the places where values may differ from those of forward.
        meaning: formats of one meaning decode to equal tensors; "" where it depends on the form, as of a seed.
        numerics: the class of what a plan with it computes; see `autotuner.ir.numerics`. Search spaces have others than
            exact ones only where a request allows their class.
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

    def is_offered(self, *, saving: bool, numerics: Numerics = "exact") -> bool:
        """Tell whether a search space has it.

        Args:
            saving: whether memory is to be saved.
            numerics: the class that is allowed.
        """
        if self.numerics != "exact":
            return self.numerics in allowed_classes(numerics)
        return saving or not self.for_memory


def _grouped(extents: Sequence[int]) -> int:
    return -(-prod(extents) // GROUP) * (GROUP + SCALE_BYTES)


def _bits(extents: Sequence[int]) -> int:
    return -(-prod(extents) // BITS)


def _words(count: int) -> Length:
    return lambda _extents: count


_ENCODINGS = "autotuner.kernels.torch.formats"
_LIBRARIES = "autotuner.kernels.torch.attention_masks"
_MASKS: Mapping[str, tuple[int, ...]] = {"dropout_mask": (0,), "dropout": (1,)}
_INEXACT: Mapping[str, tuple[int, ...]] = {
    "contraction": (0, 1), "multiply": (0, 1), "add": (0, 1), "layer_norm": (0,), "rms_norm": (0,),
    "layer_norm_grad_input": (1, 3, 4), "layer_norm_grad_parameters": (1, 2, 3), "rms_norm_grad_input": (1, 3),
    "rms_norm_grad_parameters": (1, 2), "normalised": (0, 1, 2), "normalised_grad_input": (1, 3),
    "normalised_grad_parameters": (1,),
    **dict.fromkeys(("bias", "scale", "cast", "dropout", "gelu_erf", "gelu_tanh", "silu"), (0,)),
    **dict.fromkeys(("gelu_erf_grad", "gelu_tanh_grad", "silu_grad"), (1,)),
}  # fmt: skip
"""Inputs through which an error of at most a share goes on as one of about that share: products, sums, norms and smooth
functions. ReLU's gradient is none, which takes the sign; neither is softmax, which takes the exponential."""

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
        # Integers from -127 to 127, and behind them a float32 scale for each group. Of the largest of its group, an
        # element is off by 1/254 at most: rounded to nearest, it is bounded and the same in each run, not unbiased.
        StorageFormat("int8", "uint8", _grouped, operands=_INEXACT, numerics="8-bit", encode=f"{_ENCODINGS}:to_int8",
                      decode=f"{_ENCODINGS}:from_int8", projects=True, for_memory=True),
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
