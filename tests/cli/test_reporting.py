"""The command that writes a configuration as a page."""

from pathlib import Path

import pytest

from autotuner.database import open_database
from autotuner.ir.models import Model
from autotuner.plan.configuration import Configuration, save_configuration
from tests.cli.running import Run
from tests.made_up import HERE, space_of, times


@pytest.fixture
def written(found: Configuration, tmp_path: Path) -> Path:
    save_configuration(found, tmp_path / "found.json")
    return tmp_path / "found.json"


def test_a_page_is_written_beside_the_configuration(run: Run, written: Path) -> None:
    ran = run("report", "found.json")
    assert (ran.code, ran.out) == (0, "Report written to found.html\n")
    page = written.with_suffix(".html").read_text()
    assert "<html" in page
    assert "small:wide" in page


def test_a_database_adds_what_was_measured_for_each_kernels_work(run: Run, written: Path, model: Model) -> None:
    space = space_of(model)
    with open_database(written.parent / "full.sqlite") as database:
        database.remember(HERE)
        known = times(space.calls)
        database.store(HERE.key, [(call, known[key]) for key, call in space.calls.items()])
    run("report", "found.json", "--output", "bare.html")
    ran = run("report", "found.json", "--database", "full.sqlite", "-o", "page.html")
    assert (ran.code, ran.out) == (0, "Report written to page.html\n")
    bare, page = ((written.parent / name).read_text() for name in ("bare.html", "page.html"))
    assert len(page) > len(bare)


@pytest.mark.parametrize(
    "arguments, code, sentence",
    [
        (["none.json"], 2, "none.json: cannot be read"),
        (["found.json", "--output", "missing/page.html"], 2, "missing/page.html: cannot be written"),
        (["found.json", "--database", "missing/a.sqlite"], 4, "there is no directory"),
        (["found.json", "--database", "a.sqlite", "--space", "none.yaml"], 2, "none.yaml: no such search space"),
    ],
)
def test_what_cannot_be_read_or_written_is_named(
    run: Run, written: Path, arguments: list[str], code: int, sentence: str
) -> None:
    assert written.exists()
    ran = run("report", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert sentence in " ".join(ran.err.split())
