"""Numbers as people read them, with their unit."""

from datetime import datetime

from autotuner.plan.explanation import binary

__all__ = [
    "MINUS",
    "MISSING",
    "TIMES",
    "binary",
    "change",
    "duration",
    "microseconds",
    "moment",
    "percent",
    "ratio",
    "span",
]

MISSING, MINUS, TIMES = "\u2013", "\u2212", "\u00d7"


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
