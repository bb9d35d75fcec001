"""Paths, names and links in README and docs exist."""

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests.docs.blocks import DOCUMENTS, ROOT

MADE_WHEN_RUN = {"autotuner.sqlite", "autotuner.Client"}
PATH = re.compile(r"(?<![\w/.-])((?:autotuner|search_spaces|scripts|tests|docs|\.ci)/[\w./*-]*[\w/*])")
NAME = re.compile(r"(?<![\w/.-])(autotuner(?:\.[A-Za-z_]\w*)+)(?![\w/-])")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_exists(path: Path) -> None:
    told = {found.rstrip("/") for found in PATH.findall(path.read_text())}
    assert sorted(name for name in told if not any(ROOT.glob(name))) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_name_of_the_package_can_be_imported(path: Path) -> None:
    told = set(NAME.findall(path.read_text())) - MADE_WHEN_RUN
    assert sorted(name for name in told if not is_there(name)) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in LINK.findall(path.read_text()):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            there = path.parent / name if name else path
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


def is_there(name: str) -> bool:
    """Tell whether a dotted name is a module, or something in one."""
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = HEADING.findall(path.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
