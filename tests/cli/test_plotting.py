"""The command that draws figures of a configuration."""

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from autotuner.cli.plots import KINDS, plot
from autotuner.database import open_database
from autotuner.ir.models import Model
from autotuner.plan.configuration import Configuration, save_configuration
from autotuner.plan.report.picture import Ceilings, LeanPoint, picture
from tests.cli.running import Run
from tests.made_up import HERE, space_of, times


@pytest.fixture
def written(found: Configuration, model: Model, tmp_path: Path) -> Path:
    """The folder with a configuration, and with a database of its measurements."""
    save_configuration(found, tmp_path / "found.json")
    space = space_of(model)
    with open_database(tmp_path / "full.sqlite") as database:
        database.remember(HERE)
        known = times(space.calls)
        database.store(HERE.key, [(call, known[key]) for key, call in space.calls.items()])
    return tmp_path


def words_in(path: Path) -> set[str]:
    """Return the texts of an SVG figure, which matplotlib notes beside their outlines."""
    return set(re.findall(r"<!-- (.*?) -->", path.read_text()))


def test_a_violin_has_a_row_for_each_step(run: Run, written: Path, found: Configuration) -> None:
    ran = run("plot", "found.json", "--kind", "violin", "--database", "full.sqlite", "--output", "a.svg")
    assert (ran.code, ran.out) == (0, "Figure written to a.svg\n")
    words = words_in(written / "a.svg")
    operators = [step.operators for step in found.steps if step.operators]
    assert len([words_of for words_of in operators if " + ".join(words_of) in words]) == len(operators) > 2
    assert {"in the plan", "fastest of the same work", "time of a kernel, us"} <= words


@pytest.mark.parametrize(
    ("kind", "said"), [("roofline", "flop for each byte that is moved"), ("memory", "between forward and backward")]
)
def test_other_figures_need_the_configuration_alone(run: Run, written: Path, kind: str, said: str) -> None:
    assert run("plot", "found.json", "--kind", kind, "-o", "a.svg").code == 0
    assert said in words_in(written / "a.svg")
    for ending in ("png", "pdf"):
        assert run("plot", "found.json", "--kind", kind, "-o", f"a.{ending}").code == 0
        assert (written / f"a.{ending}").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-o", "a.svg"], "a violin plot needs --database"),
        (["-o", "a.jpg", "--kind", "memory"], "'a.jpg' ends in '.jpg': a figure ends in .svg, .png, .pdf"),
        (["-o", "a.svg", "--kind", "front"], "keeps no leaner plans"),
        (["-o", "missing/a.svg", "--kind", "memory"], "missing/a.svg: cannot be written"),
    ],
)
def test_what_cannot_be_drawn_is_said(run: Run, written: Path, arguments: list[str], sentence: str) -> None:
    ran = run("plot", "found.json", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert sentence in " ".join(ran.err.split())
    assert not list(written.glob("a.*"))


@pytest.mark.parametrize(("tokens", "left"), [(None, "predicted time, us"), (256, "tokens/s, millions")])
def test_a_front_is_of_tokens_a_second_where_they_are_known_and_of_time_otherwise(
    found: Configuration, tmp_path: Path, tokens: int | None, left: str
) -> None:
    front = (LeanPoint(100.0, 3 << 30, 4 << 30), LeanPoint(128.0, 1 << 30, 2 << 30))
    drawn = replace(picture(found, Ceilings(None, {})), front=front, tokens=tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot("front", drawn, (), tmp_path / "front.svg")
    words = words_in(tmp_path / "front.svg")
    assert {left, "predicted time, us", "GiB beside parameters and inputs"} <= words
    assert ("tokens/s, millions" in words) == (tokens is not None)
    figure = Figure()
    axes: Any = figure.add_subplot()
    KINDS["front"](axes, drawn, ())
    expected = [128.0, 100.0] if tokens is None else [2.0, 2.56]
    drawn_points = [line.get_xydata().tolist() for line in axes.lines]
    assert drawn_points == [[[held, expected[0]], [more, expected[1]]] for held, more in ((1.0, 3.0), (2.0, 4.0))]
