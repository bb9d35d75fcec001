"""How times, bytes, names and forms are written in sentences."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

SHOWN = 4
NEAR = 6
TOLD = 5
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def us(value: float) -> str:
    """Write a time: "1,240.3 us"."""
    return f"{value:,.1f} us"


def more_us(value: float) -> str:
    """Write a difference of times with its sign: "+3.1 us"; what rounds to nothing has none."""
    text = f"{value:+,.1f} us"
    return "0.0 us" if text[1:] == "0.0 us" else text


def interval_us(low: float, high: float) -> str:
    """Write an interval of times: "53.1 to 55.8 us"."""
    return f"{low:,.1f} to {high:,.1f} us"


def binary(count: int) -> str:
    """Write bytes with three digits in the unit that suits them, "1.50 MiB"; beyond these, the power of ten."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_BYTES) - 1:
        value, unit = value / 1024, unit + 1
    if not unit:
        return f"{count} B"
    if value >= 999.5:
        return f"{count:.1e} B"
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {_BYTES[unit]}"


def counted(count: int, word: str) -> str:
    """Write how many: "1 step", "1,200 steps"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def some(names: Sequence[str], joint: str = ", ", shown: int = SHOWN) -> str:
    """Join names; of many, the first ones and how many more."""
    more = [f"{len(names) - shown} more"] if len(names) > shown else []
    return joint.join([*names[:shown], *more])


def listed(parts: Sequence[str]) -> str:
    """Join parts of a sentence: "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def form_words(form: str) -> str:
    """Write a form without the names of a slice's stack."""
    return "no memory at all" if form == "absent" else form.partition("#")[0]


def call_words(kernel: str, params: Iterable[tuple[str, Any]]) -> str:
    """Write a kernel with its parameters."""
    return " ".join([kernel, *(f"{name}={value}" for name, value in params)])


def near(name: str, known: Sequence[str]) -> str:
    """Return the known names that somebody may have meant, for a message."""
    alike = get_close_matches(name, known, n=NEAR, cutoff=0.5)
    inside = [other for other in known if name and name.lower() in other.lower()]
    found = list(dict.fromkeys([*alike, *inside]))[:NEAR]
    return f"near are {', '.join(found)}" if found else f"there are {some(known, shown=NEAR)}"
