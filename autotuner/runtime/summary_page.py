"""A summary as HTML: modules as a tree, each with its share of the forward's flop, and how much of that runs tuned.

Plans of tuned regions add the time of a training step and the bytes that are kept for backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html import escape

from autotuner.plan.phrases import binary, microseconds
from autotuner.runtime.coverage import Coverage, LeftOut, PlannedPart, TunedPart, percent

STYLE = """
.autotuner-summary { color-scheme: light dark; font: 14px/1.5 system-ui, sans-serif; max-width: 76rem;
  --tuned: light-dark(#1a7f37, #3fb950); --other: light-dark(#b3bbc4, #6e7781); --track: light-dark(#eef1f4, #262c33); }
.autotuner-summary ul { list-style: none; margin: 0; padding: 0; }
.autotuner-summary li li { padding-left: 1.25rem; }
.autotuner-summary li summary { list-style: none; cursor: pointer; }
.autotuner-summary .row { display: grid; gap: .75rem; align-items: center;
  grid-template-columns: calc(20rem - 1.25rem * var(--depth)) 10rem 6rem 8rem 1fr; }
.autotuner-summary .row code { overflow-wrap: anywhere; }
.autotuner-summary summary > .row code::before { content: "\\25B8\\00A0"; }
.autotuner-summary details[open] > summary > .row code::before { content: "\\25BE\\00A0"; }
.autotuner-summary li > .row code { padding-left: 1.1em; }
.autotuner-summary .bar { display: block; width: 100%; height: .65rem; background: var(--track); }
.autotuner-summary .figure { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.autotuner-summary .note { max-width: 75ch; margin-bottom: 1rem; }
.autotuner-summary .note p { margin: .25rem 0; }
.autotuner-summary .why { opacity: .8; }
.autotuner-summary pre { white-space: pre-wrap; }
@media (max-width: 40rem) {
  .autotuner-summary .row { grid-template-columns: 1fr 8rem; gap: 0 .75rem; padding-bottom: .5rem; }
  .autotuner-summary .figure { text-align: left; padding-left: 1.1em; }
  .autotuner-summary .figure:empty { display: none; }
  .autotuner-summary .row > :last-child { grid-column: 1 / -1; padding-left: 1.1em; } }
"""
"""Also of notebooks, which keep a style to the cell by its class."""
BARS = "<p><b>Bar</b>: the share of the forward's flop; the coloured part runs tuned.</p>"
FIGURES = (
    "<p><b>us</b>: time of a training step, forward and backward, in the kernels of tuned regions. It is the plans' "
    "prediction: the sum of what each kernel took when it was measured.</p>"
    "<p><b>kept</b>: what these regions leave in memory for backward, as planned.</p>"
    "<p>Both are of all layers that a * stands for, and of the fastest plans: under a memory budget, others may run "
    "that keep less. A kernel of several modules' operators counts for the innermost module that holds them all, and "
    "for none within. A figure that is not there is not known of the module alone, or it is 0.</p>"
)
"""HTML of what the bars and figures mean."""


@dataclass
class _Module:
    """A module with those within.

    Args:
        name: the last part of its path.
        flop, tuned_flop: of its own calls and of all within.
        us, kept_bytes: of all that the plans of tuned regions put down to it or to a module within.
        reasons: why calls of its own do not run tuned.
    """

    name: str
    flop: int = 0
    tuned_flop: int = 0
    us: float = 0.0
    kept_bytes: int = 0
    reasons: list[LeftOut] = field(default_factory=list)
    within: dict[str, "_Module"] = field(default_factory=dict)

    def add(self, part: TunedPart | LeftOut | PlannedPart) -> None:
        """Add what is of this module, or within it."""
        if isinstance(part, PlannedPart):
            self.us += part.us
            self.kept_bytes += part.kept_bytes
            return
        self.flop += part.flop
        self.tuned_flop += 0 if isinstance(part, LeftOut) else part.flop


def fragment(coverage: Coverage, words: str) -> str:
    """Return a summary as an element of HTML, with its style and without scripts.

    Args:
        coverage: of all graphs.
        words: the summary as text.
    """
    root = _tree(coverage)
    head = f"{percent(coverage.tuned_flop, coverage.flop)} of the flop of the forward run tuned"
    tree = "".join(_rows(each, coverage.flop, 0) for each in _ordered(root)) if coverage.flop else ""
    legend = f'<div class="note">{BARS}{FIGURES if coverage.planned else ""}</div>' if tree else ""
    return (
        f'<div class="autotuner-summary"><style>{STYLE}</style><p><strong>{escape(head)}</strong></p>{legend}'
        f"<ul>{tree}</ul><details><summary>In words</summary><pre>{escape(words)}</pre></details></div>"
    )


def page(coverage: Coverage, words: str) -> str:
    """Return a summary as a page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>What runs tuned</title></head><body>{fragment(coverage, words)}</body></html>\n"
    )


def _tree(coverage: Coverage) -> _Module:
    root = _Module("")
    parts: list[TunedPart | LeftOut | PlannedPart] = [*coverage.tuned, *coverage.left_out, *coverage.planned]
    for part in parts:
        here = root
        for name in (*(part.module.split(".") if part.module else ()), None):
            here.add(part)
            if name is not None:
                here = here.within.setdefault(name, _Module(name))
        if isinstance(part, LeftOut):
            here.reasons.append(part)
    planned = [part for part in coverage.planned if not part.module]
    if root.reasons or planned:
        own = root.within.setdefault("", _Module("the model itself"))
        own.reasons, root.reasons = root.reasons, []
        beside: list[LeftOut | PlannedPart] = [*own.reasons, *planned]
        for each in beside:
            own.add(each)
    return root


def _ordered(module: _Module) -> Iterator[_Module]:
    """Yield what is within a module, the heaviest first; chains of one within another are one."""
    for each in sorted(module.within.values(), key=lambda each: (-each.flop, -each.us)):
        found = each
        while len(found.within) == 1 and not found.reasons:
            (only,) = found.within.values()
            if (only.flop, only.us, only.kept_bytes) != (found.flop, found.us, found.kept_bytes):
                break
            found = replace(only, name=f"{found.name}.{only.name}")
        yield found


def _rows(module: _Module, whole: int, depth: int) -> str:
    share, tuned = 100 * module.flop / whole, 100 * module.tuned_flop / whole
    said = f"{percent(module.flop, whole)} of the flop"
    if module.flop:
        said += f", {percent(module.tuned_flop, module.flop)} tuned"
    why = "; ".join(dict.fromkeys(part.reason for part in module.reasons))
    bar = (
        f'<svg class="bar" role="img" aria-label="{escape(said)}" viewBox="0 0 100 4" preserveAspectRatio="none">'
        f'<rect width="{share:.3f}" height="4" fill="var(--other)"/>'
        f'<rect width="{tuned:.3f}" height="4" fill="var(--tuned)"/></svg>'
    )
    row = (
        f'<span class="row" style="--depth: {depth}"><code>{escape(module.name)}</code>{bar}'
        f'<span class="figure">{f"{microseconds(module.us)} us" if module.us else ""}</span>'
        f'<span class="figure">{f"{binary(module.kept_bytes)} kept" if module.kept_bytes else ""}</span>'
        f'<span>{escape(said)}<span class="why">{escape(": " + why) if why else ""}</span></span></span>'
    )
    inner = "".join(_rows(each, whole, depth + 1) for each in _ordered(module))
    if not inner:
        return f"<li>{row}</li>"
    return f"<li><details{' open' if depth == 0 else ''}><summary>{row}</summary><ul>{inner}</ul></details></li>"
