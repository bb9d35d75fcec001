"""A summary as HTML: which modules run tuned, as a tree."""

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

from autotuner.runtime.coverage import CompiledGraph, Coverage, LeftOut, PlannedPart, TunedPart
from autotuner.runtime.fallbacks import Summary
from autotuner.runtime.padding.report import PaddingReport
from autotuner.runtime.step_times import StepShare
from autotuner.runtime.summary_page import FIGURES

COVERAGE = Coverage(
    100, 60,
    (LeftOut("head", 1, 30, "outside of <layers>"), LeftOut("layers.*.mlp.up", 2, 10, "not tuned"),
     LeftOut("", 1, 0, "the model's own")),
    (TunedPart("layers.*.mlp.down", 40), TunedPart("layers.*.attention", 20)),
)  # fmt: skip


SUMMARY = Summary(0, Counter(), (CompiledGraph({}, frozenset(), 9, coverage=COVERAGE),))


class Rows(HTMLParser):
    """Reads names and words of the rows, with their depth, and the figures of each name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[int, str, str]] = []
        self.tags: list[str] = []
        self.figures: dict[str, list[str]] = {}
        self._in_figure = False
        self._depth, self._name, self._in_code = 0, "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        told = dict(attrs)
        if told.get("class") == "row":
            self._depth = int((told["style"] or "").rpartition(" ")[2])
        self._in_code = tag == "code"
        self._in_figure = told.get("class") == "figure"
        if tag == "svg":
            self.found.append((self._depth, self._name, told["aria-label"] or ""))

    def handle_data(self, data: str) -> None:
        if self._in_code:
            self._name, self._in_code = data, False
        if self._in_figure:
            self.figures.setdefault(self._name, []).append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_figure = self._in_figure and tag != "span"


def test_modules_are_a_tree_with_the_heaviest_first_and_reasons_are_told() -> None:
    page = SUMMARY.html()
    rows = Rows(page)
    assert rows.found == [
        (0, "layers.*", "70% of the flop, 86% tuned"),
        (1, "mlp", "50% of the flop, 80% tuned"),
        (2, "down", "40% of the flop, 100% tuned"),
        (2, "up", "10% of the flop, 0% tuned"),
        (1, "attention", "20% of the flop, 100% tuned"),
        (0, "head", "30% of the flop, 0% tuned"),
        (0, "the model itself", "0% of the flop"),
    ]
    assert "outside of &lt;layers&gt;" in page
    assert "60% of the flop of the forward run tuned" in page
    assert not {"script", "link", "img", "iframe"} & {*rows.tags}
    assert re.findall(r"https?://", page) == []


def test_each_module_has_the_time_and_the_bytes_that_plans_put_down_to_it_or_within() -> None:
    planned = (
        PlannedPart("layers.*.attention", 40.0, 0), PlannedPart("layers.*", 20.0, 1024),
        PlannedPart("layers.*.mlp.down", 5.5, 0), PlannedPart("layers.*.mlp.norm", 0.0, 3 << 20),
        PlannedPart("", 1.0, 512),
    )  # fmt: skip
    page = Summary(
        0, Counter(), (CompiledGraph({}, frozenset(), 9, coverage=replace(COVERAGE, planned=planned)),)
    ).html()
    rows = Rows(page)
    assert rows.figures == {
        "layers.*": ["65.5 us", "3.00 MiB kept"], "mlp": ["5.50 us", "3.00 MiB kept"], "down": ["5.50 us"],
        "norm": ["3.00 MiB kept"], "attention": ["40.0 us"], "the model itself": ["1.00 us", "512 B kept"],
    }  # fmt: skip
    assert [name for _, name, _ in rows.found] == [
        "layers.*", "mlp", "down", "up", "norm", "attention", "head", "the model itself",
    ]  # fmt: skip
    assert FIGURES in page


def test_without_a_plan_nothing_is_said_of_time_and_bytes() -> None:
    page = SUMMARY.html()
    assert Rows(page).figures == {}
    assert FIGURES not in page


def test_a_notebook_shows_the_same_and_nothing_compiled_is_said() -> None:
    assert SUMMARY._repr_html_() in SUMMARY.html()
    assert "<li>" not in Summary(0, Counter()).html()


def test_coverages_of_several_graphs_are_added() -> None:
    both = Coverage.of_all([COVERAGE, COVERAGE])
    assert both.tuned == (TunedPart("layers.*.mlp.down", 80), TunedPart("layers.*.attention", 40))
    assert sum(part.flop for part in both.tuned) == both.tuned_flop
    planned = (PlannedPart("a", 1.0, 8), PlannedPart("b", 2.0, 0))
    twice = Coverage.of_all([Coverage(planned=planned), Coverage(planned=planned[:1])])
    assert twice.planned == (PlannedPart("a", 2.0, 16), PlannedPart("b", 2.0, 0))


def test_figures_have_names_for_a_log() -> None:
    graph = CompiledGraph({"a": 3, "b": 1}, frozenset("a"), 9, coverage=COVERAGE)
    fallbacks: Counter[tuple[str, str, tuple[int, ...]]] = Counter({("Layer", "shape", (2,)): 1})
    found = Summary(
        3,
        fallbacks,
        (graph,),
        (StepShare(100.0, 40.0),),
        (PaddingReport(8, 2, 10, 15, 1), PaddingReport(8, 6, 10, 15, 1)),
    ).scalars()
    assert found == {
        "autotuner/calls_tuned_share": 0.75, "autotuner/flop_tuned_share": 0.6, "autotuner/regions": 4,
        "autotuner/regions_tuned": 3, "autotuner/step_us": 100.0, "autotuner/step_tuned_us": 40.0,
        "autotuner/padded_share": 0.5,
    }  # fmt: skip
    two = Summary(0, Counter(), (), (StepShare(100.0, 40.0), StepShare(50.0, 0.0))).scalars()
    assert two == {
        "autotuner/step_1_us": 100.0, "autotuner/step_1_tuned_us": 40.0, "autotuner/step_2_us": 50.0,
        "autotuner/step_2_tuned_us": 0.0,
    }  # fmt: skip
