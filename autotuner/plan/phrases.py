"""Phrases: times, bytes, shares, dates, names, stages and forms, as sentences, tables and drawings write them."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from math import ceil
from typing import Any

from autotuner.ir.formats import ABSENT

SHOWN = 4
NEAR = 6
TOLD = 5
MISSING, MINUS, TIMES = "\u2013", "\u2212", "\u00d7"
BUSY = "timed on a busy device"
ON_A_BUSY_DEVICE = f"each operator alone was {BUSY}"
KERNELS_OF_A_STEP = "predicted, kernels of one training step"
NEVER_MEASURED = "too much was never measured"
"""The reason for a gap that is not known."""
STAGES = {
    "space": "enumerating",
    "search": "searching launch parameters",
    "ceilings": "measuring ceilings",
    "compile": "compiling",
    "measure": "measuring",
    "confirm": "confirming",
    "solve": "solving",
    "end_to_end": "timing end to end",
    "done": "done",
}
"""Words for each stage of a tuning."""
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


def duration(us: float | None) -> str:
    """Write a time with three digits in the unit that suits it: "66.9 µs", "2.41 ms"."""
    if us is None:
        return MISSING
    for limit, divisor, unit in ((999.5, 1.0, "µs"), (999.5e3, 1e3, "ms"), (float("inf"), 1e6, "s")):
        if us < limit:
            return f"{_digits(us / divisor)} {unit}"
    return MISSING


def span(low: float, high: float) -> str:
    """Write an interval of times in one unit: "2.39 to 2.84 ms"."""
    texts = duration(low), duration(high)
    units = [text.rpartition(" ")[2] for text in texts]
    return f"{texts[0].rpartition(' ')[0] if units[0] == units[1] else texts[0]} to {texts[1]}"


def microseconds(us: float | None) -> str:
    """Write a time in microseconds without its unit, as the columns of one table do: "66.9", "1,240"."""
    if us is None:
        return MISSING
    return _digits(us) if us < 99.95 else f"{us:,.0f}"


def ratio(value: float | None) -> str:
    """Write how many times: "1.91×"."""
    return MISSING if value is None else f"{_digits(value)}{TIMES}"


def time_left(eta_s: float | None, left_s: float | None) -> str:
    """Write how long tuning takes yet, or else its stage; "" where neither is known.

    Args:
        eta_s, left_s: as those of `tuner.Progress`.
    """
    if left_s:
        return f"{wait(left_s)} left until the plan is chosen"
    return f"{wait(eta_s)} left of this stage" if eta_s else ""


def wait(seconds: float) -> str:
    """Write a time to wait, rounded: "99 s", "10 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def times_default(default_us: float | None, own_us: float | None, *, is_marked: bool) -> float | None:
    """Return how many times as fast as each operator alone, as declared: None where that is not known, or where its
    times were taken on a busy device, as `is_marked` says."""
    return default_us / own_us if default_us and own_us and not is_marked else None


def over_default(default_us: float | None, own_us: float | None, *, is_marked: bool) -> str:
    """Write the same: "1.32x as fast as each operator alone, as declared", or why there is no such figure; "" where
    nothing is known."""
    times = times_default(default_us, own_us, is_marked=is_marked)
    if times is not None:
        return f"{times:.2f}x as fast as each operator alone, as declared"
    return ON_A_BUSY_DEVICE if default_us and own_us else ""


def change(us: float) -> str:
    """Write a difference of times in microseconds with its sign: "+12.5", "−6.3", "0.0"."""
    text = f"{us:+.1f}" if abs(us) >= 0.05 else "0.0"
    return text.replace("-", MINUS)


def percent(share: float | None, *, signed: bool = False) -> str:
    """Write a share of 1 as percent: "12.3 %", or with its sign."""
    if share is None:
        return MISSING
    text = f"{100 * share:{'+' if signed else ''}.1f} %"
    return text.replace("-", MINUS)


def moment(text: str) -> str:
    """Write a date in ISO 8601 for people; another text stays as it is."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{at.day} {at:%B %Y, %H:%M} {at.tzname() or ''}".rstrip()


def _digits(value: float) -> str:
    """Write a number with three digits, the last of them rounded."""
    value = round(value, 9)  # sums of the same times in another order read alike
    if value >= 99.95 or not value:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def binary(count: int, *, up: bool = False) -> str:
    """Write bytes with three digits in the unit that suits them, "1.50 MiB"; beyond these, the power of ten.

    Args:
        up: what is written is no less: it is enough where somebody gives it as a budget.
    """
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_BYTES) - 1:
        value, unit = value / 1024, unit + 1
    if not unit:
        return f"{count} B"
    if value >= 999.5:
        return f"{count:.1e} B"
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    if up:
        value = ceil(value * 10**digits) / 10**digits
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


def short_form(form: str) -> str:
    """Write a form without the names of a slice's stack."""
    return form.partition("#")[0]


def form_words(form: str) -> str:
    """Write a form for a sentence."""
    return "no memory at all" if form == ABSENT else short_form(form)


def call_words(kernel: str, params: Iterable[tuple[str, Any]]) -> str:
    """Write a kernel with its parameters."""
    return " ".join([kernel, *(f"{name}={value}" for name, value in params)])


def statistics_words(statistics: Mapping[str, float]) -> str:
    """Write what solving took; what a solver counts under another name is written with that name."""
    known = {
        "largest_rows": lambda n: f"{counted(int(n), 'row')} in the largest table",
        "largest_bytes": lambda n: f"{binary(int(n))} for it",
        "estimated_bytes": lambda n: f"{binary(int(n))} at most without bounds, estimated",
        "cases": lambda n: counted(int(n), "case"),
    }
    other = "{}: {:,g}".format
    return ", ".join(known[name](n) if name in known else other(name, n) for name, n in statistics.items())


def plain(text: str) -> str:
    """Return a text with each character that is not printable as an escape, such as `\\x1b` or `\\n`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def near(name: str, known: Sequence[str]) -> str:
    """Return the known names that somebody may have meant, for a message."""
    alike = get_close_matches(name, known, n=NEAR, cutoff=0.5)
    inside = [other for other in known if name and name.lower() in other.lower()]
    found = list(dict.fromkeys([*alike, *inside]))[:NEAR]
    return f"near are {', '.join(found)}" if found else f"there are {some(known, shown=NEAR)}"
