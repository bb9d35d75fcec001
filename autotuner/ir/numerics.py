"""Numerics classes: what each allows a plan to compute, how far off results may be, and how plans tell of it.

A storage format and a kernel name the class that a request has to allow for them. Everything else that other packages
ask of a class stands here, so that a new one is its name, a declaration, and the formats or kernels that are of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autotuner.errors import InputError

Numerics = Literal["exact", "8-bit", "fp8"]
"""Name of a numerics class: as without it, backward from values saved in 8 bits, or products from operands in 8-bit
floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsClass:
    """Declaration of a numerics class. In its texts, {} stands for tensors by name, or for a count.

    Args:
        name: as requests write it.
        numbers: what it allows beside the numbers of the model: in place of saved activations where it is `for_memory`,
            and of operands of products with weights elsewhere.
        for_memory: plans have it only to save memory: under a budget, or as leaner ones beside the fastest. Otherwise,
            any plan may have it for speed.
        tolerance: of a whole layer in a check: for the largest error, as a share of the tensor's largest element, and
            for the root mean square.
        outputs_differ: outputs are allowed the tolerance, as gradients are; else they are as exact as by other plans.
        does: what a plan does with tensors.
        explanation: sentence of a plan's explanation, with how far off an element is.
        held: what forward leaves for backward in it; "" where it changes nothing of that.
        regions: what so many regions of a step do; "" likewise.
        checked: what a plan of it does and what may be off by the tolerance, in the words of a check.
    """

    name: Numerics
    numbers: str
    for_memory: bool
    tolerance: float
    outputs_differ: bool
    does: str
    explanation: str
    held: str = ""
    regions: str = ""
    checked: str


CLASSES: Mapping[Numerics, NumericsClass] = {
    each.name: each
    for each in (
        # Each element is off by 1/254 of the largest of its group at most. Gradients of layers showed up to 9e-3.
        NumericsClass(
            name="8-bit",
            numbers="8-bit integers",
            for_memory=True,
            tolerance=2e-2,
            outputs_differ=False,
            does="saves {} in 8 bits",
            explanation="Forward saves {} in 8 bits, which was allowed: backward reads each element off by 1/254 of "
                        "the largest of its group at most.",
            held="{} in 8 bits",
            regions="{} save activations in 8 bits",
            checked="saves activations in 8 bits, where a gradient",
        ),
        # Each element of an operand is off by 1/16 of itself at most. Layers showed up to 6e-2.
        NumericsClass(
            name="fp8",
            numbers="8-bit floats",
            for_memory=False,
            tolerance=0.15,
            outputs_differ=True,
            does="computes {} from operands in 8-bit floats",
            explanation="{} are computed from operands in 8-bit floats, which was allowed: each element of an operand "
                        "is off by 1/16 of itself at most.",
            checked="multiplies in 8-bit floats, where it",
        ),
    )
}  # fmt: skip
"""All classes beside "exact", which each of them allows, too."""
NUMERICS: tuple[Numerics, ...] = ("exact", *CLASSES)


def checked_numerics(given: object) -> Numerics:
    """Return the name of a numerics class.

    Raises:
        InputError: there is none of this name.
    """
    for each in NUMERICS:
        if given == each:
            return each
    *first, last = NUMERICS
    raise InputError(f"numerics is {given!r}: write {', '.join(first)} or {last}")


def allowed_classes(numerics: Numerics) -> tuple[Numerics, ...]:
    """Return the classes that are allowed where one is, itself first."""
    return (numerics,) if numerics == "exact" else (numerics, "exact")


def listed_classes(text: str, between: str = "", *, for_memory: bool) -> str:
    """Write a text with {name} and {numbers} for each class that is for memory, or for each that is not."""
    chosen = (each for each in CLASSES.values() if each.for_memory == for_memory)
    return between.join(text.format(name=each.name, numbers=each.numbers) for each in chosen)
