"""Examples in docstrings print what they say. They run in a folder with `tiny.json`, a recorded tuning."""

import doctest
import importlib
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.conftest import Tuning


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


WITH_EXAMPLES = sorted(module_name(path) for path in (ROOT / "autotuner").rglob("*.py") if ">>> " in path.read_text())


def test_some_docstrings_have_examples() -> None:
    assert {"autotuner", "autotuner.ir.form", "autotuner.kernels.registry"} <= set(WITH_EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_print_what_they_say(name: str, tuning: Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tuning.folder)
    found = doctest.testmod(importlib.import_module(name), report=True)
    assert found.attempted > 0
    assert found.failed == 0
