"""Charts on the page of a plan, in a headless Chromium: times of candidates by form, and leaner plans."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import TypeAdapter

from autotuner.database import open_database
from autotuner.plan.report.candidates import OperatorCandidates
from autotuner.tuner import build_configuration
from scripts.recorded import TINY
from tests.browser import Browser, browsing, chromium
from tests.server.http.listening import listening

pytestmark = pytest.mark.slow

OPERATOR = "context"
MARKS = ["chosen", "own best", "default"]
DRAWN = """Chart.getChart(document.querySelector('.panel canvas')).data.datasets.map((each) => ({
    label: each.label, fill: each.fill ?? null, points: each.data.map(({x, y}) => [x, y])}))"""
FRONT = """Chart.getChart(document.querySelector('canvas[aria-label*="against memory, of"]'))"""
LEANER = [
    {"predicted_us": 4000.0, "held_bytes": 3 << 20, "peak_bytes": 5 << 20},
    {"predicted_us": 5120.0, "held_bytes": 1 << 20, "peak_bytes": 3 << 20},
]
ROWS = "Chart.getChart(document.querySelector('.panel canvas')).scales.y.ticks.map((each) => each.label)"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service with the plan of the encoder layer whose measurements are recorded."""
    chromium()
    environment, known, space = TINY.environment, TINY.measurements, TINY.space()
    plan = build_configuration(TINY.model, space, known, environment, {"calls": len(space.calls)})
    with open_database(tmp_path_factory.mktemp("distribution") / "plans.sqlite") as database:
        database.remember(environment)
        database.store(environment.key, [(call, known[key]) for key, call in space.calls.items() if key in known])
        database.configurations.save(
            request_key="r", environment_key=environment.key, family_key=plan.model.family, dtype=plan.model.dtype,
            extents=plan.model.extents, complete=True, document=plan.to_json(),
            total_us=plan.certificate.predicted_us,
        )  # fmt: skip
        with listening(database) as server:
            yield server.url


@pytest.fixture(scope="module")
def found(url: str) -> OperatorCandidates:
    """The candidates as the service sends them."""
    answer = httpx2.get(f"{url}/v1/configurations/1/operators/{OPERATOR}/candidates", timeout=60)
    return TypeAdapter(OperatorCandidates).validate_python(answer.json())


@pytest.fixture
def browser(url: str, tmp_path: Path) -> Iterator[Browser]:
    with browsing(url, tmp_path) as opened:
        opened.open(f"/configurations/1/{OPERATOR}")
        opened.page.wait_for_selector(".panel canvas")
        yield opened


def drawn(browser: Browser) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = browser.page.evaluate(DRAWN)
    return shown


@pytest.mark.timeout(120)
def test_each_form_has_its_candidates_and_an_outline_around_them(browser: Browser, found: OperatorCandidates) -> None:
    (dots,) = [each["points"] for each in drawn(browser) if each["label"] == "candidate"]
    by_row: dict[int, list[float]] = {}
    for us, height in dots:
        by_row.setdefault(round(height), []).append(us)
    labels = browser.page.evaluate(ROWS)
    assert labels[0] == "all forms"
    assert sorted(by_row) == list(range(len(labels)))
    groups = found.groups
    own = [each.us for group in groups if group.operators == groups[0].operators for each in group.candidates]
    assert sorted(by_row[0]) == pytest.approx(sorted(own))
    everything = [each.us for group in groups for each in group.candidates]
    assert sorted(us for row, times_us in by_row.items() if row for us in times_us) == pytest.approx(sorted(everything))
    outlines = [each["points"] for each in drawn(browser) if each["fill"] == "shape"]
    assert len(outlines) == sum(len(set(times_us)) >= 5 for times_us in by_row.values()) >= 2
    for points in outlines:
        assert points[0] == points[-1]
        row = round(points[0][1] + (points[len(points) // 2][1] - points[0][1]) / 2)
        assert min(us for us, _ in points) == pytest.approx(min(by_row[row]))
        assert max(us for us, _ in points) == pytest.approx(max(by_row[row]))
        assert max(abs(height - row) for _, height in points) == pytest.approx(0.4)


@pytest.mark.timeout(120)
def test_the_chosen_one_its_own_best_and_the_default_are_marked_in_chart_table_and_list(
    browser: Browser, found: OperatorCandidates
) -> None:
    expected = dict(zip(MARKS, (found.chosen_us, found.best_us, found.default_us), strict=True))
    assert None not in expected.values()
    drawn_marks = {each["label"]: {us for us, _ in each["points"]} for each in drawn(browser) if each["label"] in MARKS}
    assert drawn_marks == {name: {us} for name, us in expected.items()}
    page = browser.page
    page.locator(".panel summary").focus()
    page.keyboard.press("Enter")
    numbers = page.locator(".panel details table")
    for name in MARKS:
        assert numbers.locator(".badge", has_text=name).count() >= 1
    words = page.locator(".panel canvas").get_attribute("aria-label") or ""
    assert all(f"{name} " in words for name in MARKS)
    listed = page.locator(".panel table").last
    assert [listed.locator(".badge", has_text=name).count() for name in MARKS] == [1, 1, 1]
    browser.keep("distribution")


@pytest.mark.timeout(120)
def test_the_rows_are_forms_of_the_tensor_that_the_keyboard_chooses(
    browser: Browser, found: OperatorCandidates
) -> None:
    page = browser.page
    groups = [group for group in found.groups if group.operators == found.groups[0].operators]
    chooser = page.get_by_label("Rows of the chart")
    tensors = [
        value for value in chooser.locator("option").evaluate_all("all => all.map((each) => each.value)") if value
    ]
    assert len(tensors) > 1
    for place, tensor in enumerate(tensors):
        if place:
            chooser.focus()
            page.keyboard.press("ArrowDown")
        assert chooser.input_value() == tensor
        forms = {dict(group.forms)[tensor].partition("@")[0] for group in groups if group.candidates}
        assert forms <= set(page.evaluate(ROWS))
        page.wait_for_selector(f".panel caption:has-text('Times by forms of {tensor}')", state="attached")
    said = page.inner_text("#said")
    assert said.endswith(f"rows, forms of {tensors[-1]}")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("tokens", "title", "rates"), [(256, "tokens", [64_000, 50_000]), (None, "training steps", [250, 195.3125])]
)
def test_leaner_plans_have_tokens_a_second_where_they_are_known(
    url: str, tmp_path: Path, tokens: int | None, title: str, rates: list[float]
) -> None:
    with browsing(url, tmp_path) as browser:
        page = browser.page
        page.route(
            "**/plan", lambda route: route.fulfill(json={**route.fetch().json(), "front": LEANER, "tokens": tokens})
        )
        browser.open("/configurations/1")
        page.wait_for_selector("text=In multiples of the best")
        held, peak = page.evaluate(f"{FRONT}.data.datasets.map((each) => each.data.map(({{x, y}}) => [x, y]))")
        assert held == [[each["held_bytes"], rate] for each, rate in zip(LEANER, rates, strict=True)]
        assert peak == [[each["peak_bytes"], rate] for each, rate in zip(LEANER, rates, strict=True)]
        assert page.evaluate(f"{FRONT}.scales.y.options.title.text") == f"{title} per second"
        table = page.locator("table", has_text="Leaner plans").first
        told = table.inner_text()
        assert ("Tokens per second" in told) == ("64K" in told) == (tokens is not None)
        assert "4.00 ms" in told
        if tokens is not None:
            assert f"A training step is of {tokens} tokens" in page.inner_text("main")
            browser.keep("front")


def test_a_plan_has_the_tokens_of_its_batch_and_length(url: str) -> None:
    extents = TINY.model.extents
    assert httpx2.get(f"{url}/v1/configurations/1/plan", timeout=60).json()["tokens"] == extents["b"] * extents["l"]
