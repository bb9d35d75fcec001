"""The page: complete, by itself, and safe whatever a configuration's texts contain."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from autotuner.errors import ConfigurationError
from autotuner.ir.models import Model
from autotuner.ir.records import Doubt, Measurement
from autotuner.plan.configuration import Configuration
from autotuner.plan.parts import Fusion, Measured
from autotuner.plan.report import compare, render, tally
from autotuner.plan.step import Alternative, Step
from autotuner.plan.summary import figures
from tests.made_up import made_up_configuration, space_of, times
from tests.plan.explained import TURNED, explained_configuration, with_again
from tests.plan.report.reading import Page
from tests.tuner.conftest import Recorded

pytestmark = pytest.mark.slow

EVIL = '</title></style><script>alert(1)</script>"><img src=x onerror="alert(2)">&amp;\'{{ 7 * 7 }}'


@pytest.fixture(scope="module")
def page(recorded: Recorded, encoder: Configuration) -> Page:
    rows = compare(recorded.space, recorded.measurements, encoder)
    return Page(render(encoder, rows, counts=tally(recorded.space, recorded.measurements)))


@pytest.fixture(scope="module")
def bare(encoder: Configuration) -> Page:
    return Page(render(encoder))


@pytest.fixture(scope="module")
def made_up(small: Model) -> Configuration:
    return made_up_configuration(small)


def cells(page: Page, number: int) -> list[str]:
    """Return the texts of a step's row in the table of steps."""
    row = page.one("tr", id=f"step-{number}")
    return [" ".join(cell.text.split()) for cell in row.children]


# By itself, and for everybody


def test_the_page_needs_no_other_file_and_no_script(page: Page, bare: Page) -> None:
    for one in (page, bare):
        assert not {element.tag for element in one.elements} & {"script", "link", "img", "iframe", "object", "use"}
        for element in one.elements:
            assert not element.attributes.keys() & {"src", "srcset", "xlink:href", "action"}
            assert not [name for name in element.attributes if name.startswith("on")]
            assert (element.attributes.get("href") or "#").startswith("#")
        for style in one.all("style"):
            assert "@import" not in style.text
            assert "url(" not in style.text


def test_ids_are_unique_and_every_link_leads_somewhere(page: Page, bare: Page) -> None:
    for one in (page, bare):
        ids = [element.attributes["id"] for element in one.elements if "id" in element.attributes]
        assert len(ids) == len(set(ids))
        links = [
            e.attributes[a] or "" for e in one.elements for a in ("href", "for", "aria-labelledby") if a in e.attributes
        ]
        assert {link.removeprefix("#") for link in links} <= set(ids)


def test_tables_have_headers_and_names_and_drawings_have_words(page: Page) -> None:
    for table in page.all("table"):
        assert [caption for caption in table.within("caption") if caption.text.strip()]
        assert all(header.attributes.get("scope") for header in table.within("th"))
        for row in table.within("tbody")[0].children:
            assert "th" in [cell.tag for cell in row.children]
    for svg in page.all("svg"):
        assert svg.attributes.get("aria-hidden") == "true" or svg.attributes.get("aria-label")
    assert page.one("html").attributes["lang"] == "en"


def test_both_colour_schemes_and_print_are_styled(page: Page) -> None:
    style = page.all("style")[0].text
    assert "@media (prefers-color-scheme: dark)" in style
    assert "@media print" in style
    named, defined = set(re.findall(r"var\((--[\w-]+)", style)), set(re.findall(r"(--[\w-]+):", style))
    assert named - defined <= {"--width"}, "a colour is used that is not defined"


# What it shows


def test_the_summary_states_what_the_configuration_knows_about_itself(page: Page, encoder: Configuration) -> None:
    summary = page.one("section", id="summary").text
    assert "1.61 ms" in summary
    assert "2.00× as fast as eager, the faster of its peers" in summary  # noqa: RUF001
    for name in ("torch.compile", "lower bound", "the paper's shortest path", "default", "bytes moved"):
        assert name in summary
    facts = page.one("section", id="facts").text
    for fact in (encoder.model.dtype, "AMD EPYC", "2.13.0+cpu", encoder.environment_key, encoder.key):
        assert fact in facts


def test_a_doubtful_configuration_says_so_and_why(encoder: Configuration) -> None:
    doubtful = replace(encoder, doubts=(Doubt("contended", "7 of 9 times were taken in a bad moment."),))
    told = Page(render(doubtful)).one("section", id="summary").text
    assert "This is doubtful. 7 of 9 times were taken in a bad moment." in told
    figure = next(each for each in figures(doubtful) if each.name == "proven gap")
    assert figure.words.endswith("by times that are doubtful")
    assert next(each for each in figures(encoder) if each.name == "proven gap").words.endswith("by medians")


def test_every_step_is_a_box_and_a_row_with_its_times(page: Page, recorded: Recorded, encoder: Configuration) -> None:
    rows = compare(recorded.space, recorded.measurements, encoder)
    for number, (step, row) in enumerate(zip(encoder.steps, rows, strict=True), start=1):
        box = page.one("a", id=f"box-{number}")
        texts = cells(page, number)
        for name in step.operators:
            assert name in box.text
            assert name in texts[1]
        assert step.kernel in texts[2]
        assert texts[9:12] == [f"{row.measured}/{row.candidates}", "0", "0"]
    texts = cells(page, 1)
    assert (texts[3], texts[5], texts[6], texts[7]) == ("65.8", "65.8", "85.2", "148")
    assert "best 65.8; chosen 65.8; default 85.2; worst 148 µs" in texts[8]


def test_edges_carry_tensors_with_their_layouts_and_conversions_stand_out(page: Page, encoder: Configuration) -> None:
    drawing = page.one("section", id="graph")
    labels = {" ".join(text.text.split()) for text in drawing.within("text")}
    conversion = next(step for step in encoder.steps if step.is_conversion and "#" not in step.inputs[0][1])
    (tensor, source), (_, target) = conversion.inputs[0], conversion.outputs[0]
    assert f"{tensor} {source}" in " | ".join(labels)
    assert f"{tensor} {source} → {target}" in labels
    assert len(page.all("a", class_="conversion")) == sum(step.is_conversion for step in encoder.steps)
    assert len(page.all("a", class_="fused")) == sum(len(step.operators) > 1 for step in encoder.steps)


def test_without_measurements_the_page_says_so_and_how_to_give_them(bare: Page) -> None:
    steps = bare.one("section", id="steps").text
    assert "measurements were not at hand" in steps
    assert "autotuner report CONFIGURATION.json --database" in steps
    assert "worst" not in steps.replace("default, worst and", "")
    texts = cells(bare, 1)
    assert (texts[3], texts[5]) == ("65.8", "65.8")


def test_a_database_without_these_measurements_is_told_apart_from_none(
    recorded: Recorded, encoder: Configuration
) -> None:
    page = Page(render(encoder, compare(recorded.space, {}, encoder), counts=tally(recorded.space, {})))
    steps = page.one("section", id="steps").text
    assert "holds no time for any step" in steps
    assert encoder.environment_key[:12] in steps
    assert cells(page, 1)[5] == "65.8"
    assert f"{len(recorded.space.calls):,}" in page.one("section", id="counts").text


def test_what_is_unknown_stays_unknown_and_what_failed_is_counted_by_status(
    small: Model, made_up: Configuration
) -> None:
    space = space_of(small)
    known = times(space.calls)
    number, step = next((n, s) for n, s in enumerate(made_up.steps, start=1) if s.operators)
    own = [c.call.key for c in space.choices if set(c.cover.operators) == set(step.operators)]
    for key in dict.fromkeys(own):
        del known[key]
    known[own[0]] = Measurement("wrong", message="output 0 differs")
    page = Page(render(made_up, compare(space, known, made_up)))
    texts = cells(page, number)
    assert (texts[5], texts[7]) == ("not known", "not known")
    assert "best not known" in texts[8]
    assert texts[9:12] == [f"0/{len(set(own))}", "1 wrong", str(len(set(own)) - 1)]
    assert "output 0 differs" in texts[1]


def test_fused_sets_say_what_was_chosen_rejected_and_never_timed(made_up: Configuration) -> None:
    sets = (
        Fusion(("product", "biased"), "fast_one", 5.0, 9.0, chosen=False),
        Fusion(("biased", "y"), "", None, 9.0, chosen=False),
        Fusion(("product", "biased", "y"), "whole", 7.0, 7.0, chosen=True),
    )
    rows = Page(render(replace(made_up, fusions=sets))).one("section", id="fused").within("tr")[1:]
    texts = [[" ".join(cell.text.split()) for cell in row.children] for row in rows]
    assert texts == [
        ["product + biased + y", "whole", "7.00", "7.00", "0.0", "chosen"],
        ["product + biased", "fast_one", "5.00", "9.00", "−4.0", "rejected"],  # noqa: RUF001
        ["biased + y", "none with a time", "not known", "9.00", "", "failed or not measured"],
    ]
    assert "No kernel of the search space" in render(replace(made_up, fusions=()))


def test_counts_of_the_tuning_and_of_the_database_stand_side_by_side(made_up: Configuration) -> None:
    counts = {"choices": 90, "calls": 40, "measured": 30, "reused": 5, "unknown": 5, "failed": 3, "status_wrong": 3,
              "status_ok": 32}  # fmt: skip
    html = render(replace(made_up, counts=counts), counts={"ok": 36, "out_of_memory": 4, "unknown": 0})
    rows = Page(html).one("section", id="counts").within("tr")[1:]
    texts = {row.children[0].text: (row.children[1].text, row.children[2].text) for row in rows}
    assert texts == {
        "choices": ("90", "–"), "calls": ("40", "40"), "measured": ("30", "–"), "reused": ("5", "–"),  # noqa: RUF001
        "with a time": ("32", "36"), "failed": ("3", "4"), "wrong": ("3", "0"), "out of memory": ("–", "4"),  # noqa: RUF001
        "unknown": ("5", "0"),
    }  # fmt: skip


def test_counts_of_sampled_cells_say_what_was_tried_and_what_was_not(made_up: Configuration) -> None:
    counts = {"cells_enumerated": 7, "cells_sampled": 2, "sampled_combinations": 1800, "sampled_tried": 80}
    rows = Page(render(replace(made_up, counts=counts))).one("section", id="counts").within("tr")[1:]
    texts = {row.children[0].text: row.children[1].text for row in rows}
    names = ("cells enumerated", "cells sampled", "tried", "untried")
    assert [texts[name] for name in names] == ["7", "2", "80", "1,720"]
    assert "cells sampled" not in render(replace(made_up, counts=counts | {"cells_sampled": 0}))


def test_a_configuration_that_was_not_timed_has_no_peers_and_says_so(made_up: Configuration) -> None:
    summary = Page(render(made_up)).one("section", id="summary").text
    assert "has not been timed end to end" in summary
    assert "no peers to compare it with" in summary


def test_a_plan_that_is_slower_than_its_peer_is_not_called_faster(made_up: Configuration) -> None:
    slow = made_up.with_measured(Measured(200.0, 10.0, {"eager": 100.0}, 3))
    summary = Page(render(slow)).one("section", id="summary").text
    assert "0.50× as fast as eager, its peer" in summary  # noqa: RUF001
    assert "this configuration is not faster" in summary


def test_a_gap_that_is_not_known_is_no_zero(made_up: Configuration) -> None:
    certificate = replace(made_up.certificate, lower_bound_us=0.0, proven_gap=None, default_us=None, baseline_us=None)
    summary = Page(render(replace(made_up, certificate=certificate))).one("section", id="summary").text
    assert "too much was never measured" in summary
    assert "The default is not known" in summary
    assert "shortest path found no plan" in summary


# Certificate, memory and other ways


@pytest.fixture(scope="module")
def explained(small: Model) -> Configuration:
    return explained_configuration(small)


def rows_of(page: Page, caption: str) -> list[list[str]]:
    """Return the texts of the rows of the table with this caption."""
    table = next(t for t in page.all("table") if caption in t.within("caption")[0].text)
    return [[" ".join(cell.text.split()) for cell in row.children] for row in table.within("tbody")[0].children]


def test_the_summary_states_interval_and_both_gaps(explained: Configuration) -> None:
    summary = " ".join(Page(render(explained)).one("section", id="summary").text.split())
    assert "38.5 to 46.5 µs within their 95 % intervals" in summary
    assert "proven gap5.0 % no plan takes less than 40.0 µs, by medians" in summary
    assert "estimated gap1.0 % by learned costs: not proven" in summary
    assert "2 steps take 3.5 us above their own best" in summary
    assert "1 conversion, 2.0 us: " in summary
    unknown = replace(explained.certificate, estimated_gap=None)
    assert "estimated gap" not in render(replace(explained, certificate=unknown))


def test_memory_as_planned_and_as_measured_stand_beside_the_budget_and_the_peers(explained: Configuration) -> None:
    rows = rows_of(Page(render(explained)), "Memory")
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("budget", "64.0 KiB", ""), ("held for backward", "20.0 KiB", ""), ("peak, as planned", "40.0 KiB", ""),
        ("peak, measured", "39.0 KiB", ""), ("eager", "80.0 KiB", "2.05×"),  # noqa: RUF001
    ]  # fmt: skip
    assert "+2.6 % from measured" in rows[2][4]


def test_memory_that_is_not_known_has_no_table_and_an_unknown_peer_no_ratio(explained: Configuration) -> None:
    assert explained.measured is not None
    assert "Memory beside" not in render(replace(explained, memory=None, measured=None))
    unknown = replace(explained.measured, peers_peak_bytes={"eager": None})
    assert rows_of(Page(render(replace(explained, measured=unknown))), "Memory")[-1][:3] == ["eager", "–", ""]  # noqa: RUF001
    planned = rows_of(Page(render(replace(explained, measured=None))), "Memory")
    assert [row[0] for row in planned] == ["budget", "held for backward", "peak, as planned"]


def test_candidates_that_could_overtake_are_ten_at_most_the_likeliest_first(explained: Configuration) -> None:
    (row,) = rows_of(Page(render(explained)), "What could still overtake: 1 of 1 candidate,")
    assert row == ["product", "with product as fb in place of bf", "+3.1", "−0.4"]  # noqa: RUF001
    many = tuple(replace(TURNED, extra_low_us=-number / 10) for number in range(12))
    rows = rows_of(Page(render(replace(explained, overtaking=many))), "What could still overtake: 10 of 12 candidates")
    assert [row[3] for row in rows][:2] == ["−1.1", "−1.0"]  # noqa: RUF001
    assert len(rows) == 10
    assert "What could still overtake" not in render(replace(explained, overtaking=()))


def test_every_step_says_what_the_best_other_way_would_cost(explained: Configuration) -> None:
    page = Page(render(explained))
    assert [cells(page, number)[-1] for number in range(1, 8)] == ["+3.1", "+4.0", "none", "–", "none", "none", "none"]  # noqa: RUF001
    assert page.one("tr", id="step-1").children[-1].attributes["class"] == "number near"
    assert page.one("tr", id="step-2").children[-1].attributes["class"] == "number"
    first = cells(page, 1)[1]
    assert "95 % interval9.00 to 11.5 µs" in first
    assert (
        "with product as fb in place of bf: +3.1 µs in all, at least −0.4 µs within the intervals; "  # noqa: RUF001
        "it takes 8.50 µs itself where 10.0 µs are taken now: −1.5 µs here, +4.6 µs elsewhere"  # noqa: RUF001
    ) in first
    assert "it takes 12.0 µs itself" in cells(page, 2)[1]


def test_where_no_other_way_is_recorded_there_is_no_column_of_them(made_up: Configuration) -> None:
    bare = replace(made_up, steps=tuple(replace(step, alternative=None) for step in made_up.steps))
    assert "other way" not in render(bare).lower()


def test_what_backward_computes_again_is_a_step_that_says_so(explained: Configuration, small: Model) -> None:
    found = with_again(explained)
    space = space_of(small)
    page = Page(render(found, compare(space, times(space.calls), found)))
    assert "again, for backward" in cells(page, 3)[1]
    assert "product" in cells(page, 3)[1]
    assert cells(page, 3)[-1] == "–"  # noqa: RUF001
    assert "again: contraction" in page.one("a", id="box-3").text
    assert "Backward computes again what is not held: product." in page.one("section", id="summary").text


# Texts of others


def in_texts(found: Configuration) -> Configuration:
    """Put markup wherever a configuration's file admits any text."""
    step, *rest = found.steps
    other = Alternative((EVIL,), EVIL, ((EVIL, EVIL),), ((EVIL, EVIL),), (), 1.0, -1.0)
    steps = (replace(step, kernel=EVIL, params=((EVIL, EVIL),), alternative=other), *rest)
    model = replace(found.model, name=EVIL, preset=EVIL, options={EVIL: EVIL})
    return replace(
        found,
        model=model,
        steps=steps,
        environment={"device_name": EVIL, "device_type": EVIL, "facts": {EVIL: EVIL}, "policy": {EVIL: [EVIL]}},
        environment_key=EVIL,
        certificate=replace(found.certificate, solver=EVIL),
        fusions=(Fusion((EVIL, "y"), EVIL, 1.0, 2.0, chosen=False),),
        counts={EVIL: 1},
        created_at=EVIL,
        versions={"autotuner": EVIL, EVIL: EVIL},
        measured=Measured(10.0, 1.0, {EVIL: 20.0}, 3, 1, {EVIL: 2}),
        overtaking=(other,),
    )


def test_markup_in_the_texts_of_a_configuration_is_text_on_the_page(small: Model, made_up: Configuration) -> None:
    space = space_of(small)
    known = {key: Measurement("error", message=EVIL) for key in space.calls}
    last = next(step for step in reversed(made_up.steps) if step.operators)
    working = next(c.call.key for c in space.choices if c.cover.operators == last.operators)
    known[working] = Measurement("ok", median_us=5.0)
    rows = [replace(row, failures=tuple(replace(f, kernel=EVIL) for f in row.failures))
            for row in compare(space, known, made_up)]  # fmt: skip
    html = render(in_texts(made_up), rows)
    page = Page(html)
    assert not {element.tag for element in page.elements} & {"script", "img"}
    assert not [name for element in page.elements for name in element.attributes if name.startswith("on")]
    assert "<script" not in html
    assert "49" not in page.one("h1").text
    for place in ("summary", "graph", "steps", "fused", "shares", "facts"):
        assert EVIL in page.one("section", id=place).text, f"{place} does not show the text as it is"
    assert EVIL in page.one("h1").text
    assert EVIL in page.all("title")[0].text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda step: replace(step, inputs=(("nobody", "ab"),)), "'nobody', which its graph lacks"),
        (lambda step: replace(step, operators=("nothing",)), "'nothing', which its graph lacks"),
        (lambda step: replace(step, operators=()), "computes nothing and is no conversion"),
    ],
)
def test_a_step_that_does_not_fit_its_graph_is_refused(
    made_up: Configuration, change: Callable[[Step], Step], message: str
) -> None:
    number = next(n for n, step in enumerate(made_up.steps) if len(step.inputs) > 1)
    steps = list(made_up.steps)
    steps[number] = change(steps[number])
    with pytest.raises(ConfigurationError, match=message):
        render(replace(made_up, steps=tuple(steps)))


def test_rows_of_another_configuration_are_refused(
    recorded: Recorded, encoder: Configuration, made_up: Configuration
) -> None:
    rows = compare(recorded.space, recorded.measurements, encoder)
    with pytest.raises(ConfigurationError, match="give those that `compare` returns for this configuration"):
        render(made_up, rows)
