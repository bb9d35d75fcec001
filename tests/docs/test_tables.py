"""Tables of the documents list what there is: variables, metrics, paths, the client's methods, presets, kinds."""

import re
from itertools import product
from pathlib import Path

import pytest

from autotuner.database import open_database
from autotuner.ir.kinds import KINDS
from autotuner.ir.models import load_model, search_spaces_dir
from autotuner.server.client import Client
from autotuner.server.http import create_app
from tests.docs.blocks import DOCUMENTS, ROOT

PACKAGE = "\n".join(path.read_text() for path in (ROOT / "autotuner").rglob("*.py"))
TEXTS = {path.name: path.read_text() for path in DOCUMENTS}


def rows(text: str, head: str) -> list[list[str]]:
    """Return the cells of each row of the table that has such a head."""
    (table,) = re.findall(rf"^\| {re.escape(head)}.*\n\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()]


@pytest.mark.parametrize("name", TEXTS)
def test_every_variable_is_read(name: str) -> None:
    told = set(re.findall(r"\bAUTOTUNER_[A-Z_]+\b", TEXTS[name])) - {
        "AUTOTUNER_TEST_POSTGRES",
        "AUTOTUNER_TEST_SCREENSHOTS",
    }
    assert [variable for variable in sorted(told) if f'"{variable}"' not in PACKAGE] == []


def test_every_metric_is_in_the_table_and_every_row_is_a_metric() -> None:
    told = set(re.findall(r"\bautotuner_[a-z_]+\b", TEXTS["service.md"]))
    source = (ROOT / "autotuner" / "server" / "http" / "metrics.py").read_text()
    there = set(re.findall(r'"(autotuner_[a-z_]+)"', source))
    assert {name.removesuffix("_total") for name in told} == {name.removesuffix("_total") for name in there}


def test_every_path_of_the_service_is_one(tmp_path: Path) -> None:
    with open_database(tmp_path / "empty.sqlite") as database:
        paths = create_app(database).openapi()["paths"]
    known = [re.sub(r"\{\w+\}", "[^/]+", path) for path in paths]
    told = {
        path.partition("?")[0] for text in TEXTS.values() for path in re.findall(r"(?<![\w.])/v1/[\w/?=:.-]+", text)
    }
    told = {path.rstrip(".,'") for path in told}
    assert [path for path in sorted(told) if not any(re.fullmatch(each, path) for each in known)] == []


def test_the_clients_methods_exist() -> None:
    table = rows(TEXTS["service.md"], "method | returns")
    told = {name for cells in table for name in re.findall(r"`(\w+)\(", cells[0])}
    public = {name for name, value in vars(Client).items() if callable(value) and not name.startswith("_")} - {"close"}
    assert told == public


def test_presets_have_their_extents() -> None:
    text = TEXTS["models.md"]
    for model in ("bert-encoder", "gpt-block"):
        part = text.partition(f"Presets of `{model}`")[2]
        (table,) = re.findall(r"\A.*\n\n\| preset .*\n\| ---.*\n((?:\|.*\n)+)", part)
        told = {}
        for row in table.splitlines():
            name, *extents = [cell.strip() for cell in row.strip("|").split("|")]
            told[name.strip("`")] = dict(zip("blhnpf", map(int, extents[:6]), strict=True))
        assert told == {name: dict(found) for name, found in load_model(model).definition.presets.items()}


def test_every_model_is_named() -> None:
    files = {path.stem.replace("_", "-") for path in (search_spaces_dir() / "models").glob("*.yaml")}
    assert [name for name in sorted(files) if f"`{name}" not in TEXTS["models.md"]] == []


def test_every_kind_is_in_the_tables() -> None:
    assert [name for name in sorted(KINDS) if f"`{name}`" not in TEXTS["models.md"]] == []


def test_every_kernel_is_named() -> None:
    """A name may be shortened behind one with which it begins: `cublas_matmul`, `_add`."""
    text = TEXTS["kernels.md"]
    told = set(re.findall(r"`(\w+)`", text))
    short = {name for name in told if name.startswith("_")}
    named = told | {whole + end for whole, end in product(told - short, short)}
    for path in (search_spaces_dir() / "kernels").glob("*.yaml"):
        listed = re.findall(r"^  (\w+):", path.read_text().partition("kernels:")[2], re.MULTILINE)
        assert listed
        assert sorted(set(listed) - named) == [], path.name


def test_reasons_for_what_is_not_tuned_are_those_that_the_package_gives() -> None:
    told = [
        text for cells in rows(TEXTS["supported.md"], "it says | why") for text in re.findall(r"`([^`]+)`", cells[0])
    ]
    parts = [part.strip(" ,") for text in told for part in text.split("...")]
    assert [part for part in parts if part not in PACKAGE] == []
