"""The slope of GELU from its result: what backward needs, without what GELU read.

GELU falls to its least value and rises behind it. So its result and one bit, on which side of the least value it
lies, say where it was. On each side, the slope is a function of the root of the distance to the least value. The
functions here are fitted to it: within 4e-5 on the left, 1e-4 on the right and 4e-4 next to the least value. There
the slope changes with the root of what the result is rounded by: of normal arguments in bfloat16, it is off by
1.6e-3, root mean square, as much as the framework's gradient is by its own rounding. In float16 it is off by twice
that error, and in float32 by several hundred times.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

LEAST_AT = -0.752
"""GELU's argument at its least value, within 5e-4 for both kinds: there the result changes by less than 1e-7."""
TOP = 4.5
"""The result from which on the slope is 1."""
SMALLEST = 1e-30
"""The distance to 0 below which a result on the left side is taken for this."""


@dataclass(frozen=True)
class Fit:
    """The slope as a function of the result y, and of the root s of its distance to the least value.

    Args:
        least: the least value.
        left: of s, s**2, ...
        tail: of t and s t, where t = -y log(-y), as the slope goes to 0.
        right: of Chebyshev polynomials of s, scaled to [-1, 1].
    """

    least: float
    left: tuple[float, ...]
    tail: tuple[float, float]
    right: tuple[float, ...]


FITS = {
    "gelu_erf": Fit(
        -0.16997120747990369,
        (-0.670680784, 1.07825494, 1.82485978, -2.42746985, 2.98247002),
        (0.000124112449, 0.839863917),
        (0.745301705, 0.473554239, -0.294819756, 0.0404642484, 0.0578765541, -0.013862406, -0.0104454108,
         -0.000946124326, 0.00231540858, 0.00113821271, -8.46763555e-05, -0.000402992847, -0.000109561779),
    ),
    "gelu_tanh": Fit(
        -0.17004075057125403,
        (-0.617210248, 1.19046436, 0.701112895, 0.973305077, -2.11416158),
        (3.43162846e-05, 1.02809191),
        (0.745257062, 0.473578831, -0.294914659, 0.0403046391, 0.0579553759, -0.013631156, -0.0102908608,
         -0.0010779529, 0.00214122683, 0.00111701158, -8.04795598e-06, -0.000343933684, -0.000125436418),
    ),
}  # fmt: skip
"""By operator kind."""
APPROXIMATE = {"gelu_erf": "none", "gelu_tanh": "tanh"}
"""Torch's name of each."""
FARTHEST, PLACES = 12.0, 1 << 16
"""An argument from which on GELU is 0, or the argument itself; and arguments on each side that are tried."""


def is_right(x: Tensor) -> Tensor:
    """Return on which side of GELU's least value its arguments are: 1.0 for the right one, and behind no number."""
    return torch.where(x < LEAST_AT, 0.0, 1.0)


def slope(kind: str, y: Tensor, right: Tensor) -> Tensor:
    """Return GELU's slope in float32.

    Args:
        kind: of the operator, in `FITS`.
        y: its result.
        right: `is_right` of its argument, any type.
    """
    fit = FITS[kind]
    wide = y.float()
    root = (wide - fit.least).clamp(min=0).sqrt()
    falling = torch.zeros_like(root)
    for factor in reversed(fit.left):
        falling = (falling + factor) * root
    below = (-wide).clamp(min=SMALLEST)
    falling = falling + below * below.log() * (fit.tail[0] + fit.tail[1] * root)
    return torch.where(right > 0, _rising(fit, wide, root), falling)


def argument_from(kind: str, y: Tensor, right: Tensor) -> Tensor:
    """Return GELU's argument, in float64, from its result: among arguments that lie close, by a straight line."""
    found = []
    for end in (-FARTHEST, FARTHEST):
        tried = torch.linspace(LEAST_AT, end, PLACES, dtype=torch.float64, device=y.device)
        results = functional.gelu(tried, approximate=APPROXIMATE[kind]).cummax(0).values
        place = torch.searchsorted(results, y.double().contiguous()).clamp(1, PLACES - 1)
        below, above = results[place - 1], results[place]
        share = ((y - below) / (above - below).clamp(min=torch.finfo(torch.float64).tiny)).clamp(0, 1)
        found.append(torch.lerp(tried[place - 1], tried[place], share))
    return torch.where(right > 0, torch.where(y > FARTHEST, y.double(), found[1]), found[0])


def _rising(fit: Fit, wide: Tensor, root: Tensor) -> Tensor:
    """Return the slope on the right side: Clenshaw's sum of the polynomials, and 1 above `TOP`."""
    place = root * (2 / (TOP - fit.least) ** 0.5) - 1
    first = second = torch.zeros_like(place)
    for factor in reversed(fit.right[1:]):
        first, second = 2 * place * first - second + factor, first
    return torch.where(wide >= TOP, 1.0, place * first - second + fit.right[0])
