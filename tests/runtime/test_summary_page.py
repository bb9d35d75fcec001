"""A summary as HTML: which modules run tuned, as a tree."""

import re
from collections import Counter
from html.parser import HTMLParser

from autotuner.runtime.coverage import CompiledGraph, Coverage, LeftOut, TunedPart
from autotuner.runtime.fallbacks import Summary
from autotuner.runtime.padding.report import PaddingReport
from autotuner.runtime.step_times import StepShare

COVERAGE = Coverage(
    100, 60,
    (LeftOut("head", 1, 30, "outside of <layers>"), LeftOut("layers.*.mlp.up", 2, 10, "not tuned"),
     LeftOut("", 1, 0, "the model's own")),
    (TunedPart("layers.*.mlp.down", 40), TunedPart("layers.*.attention", 20)),
)  # fmt: skip


SUMMARY = Summary(0, Counter(), (CompiledGraph({}, frozenset(), 9, coverage=COVERAGE),))


class Rows(HTMLParser):
    """Reads names and words of the rows, with their depth."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[int, str, str]] = []
        self.tags: list[str] = []
        self._depth, self._name, self._in_code = 0, "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        told = dict(attrs)
        if told.get("class") == "row":
            self._depth = int((told["style"] or "").rpartition(" ")[2])
        self._in_code = tag == "code"
        if tag == "svg":
            self.found.append((self._depth, self._name, told["aria-label"] or ""))

    def handle_data(self, data: str) -> None:
        if self._in_code:
            self._name, self._in_code = data, False


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


def test_a_notebook_shows_the_same_and_nothing_compiled_is_said() -> None:
    assert SUMMARY._repr_html_() in SUMMARY.html()
    assert "<li>" not in Summary(0, Counter()).html()


def test_coverages_of_several_graphs_are_added() -> None:
    both = Coverage.of_all([COVERAGE, COVERAGE])
    assert both.tuned == (TunedPart("layers.*.mlp.down", 80), TunedPart("layers.*.attention", 40))
    assert sum(part.flop for part in both.tuned) == both.tuned_flop


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
