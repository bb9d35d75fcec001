"""`docs/api.md` names all that `import autotuner` offers, with the arguments that each takes."""

import re
from inspect import signature

import pytest

import autotuner
from tests.docs.blocks import ROOT

TEXT = (ROOT / "docs" / "api.md").read_text()
CALLS = dict(re.findall(r"`autotuner\.(\w+)\(([\w, ]+)\)`", TEXT))


def test_every_public_name_has_a_row() -> None:
    rows = "\n".join(line for line in TEXT.splitlines() if line.startswith("| `autotuner."))
    assert set(re.findall(r"`autotuner\.(\w+)[`(]", rows.replace("](", " "))) == set(autotuner.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_a_row_has_the_arguments_in_their_order(name: str) -> None:
    assert CALLS[name].split(", ") == list(signature(getattr(autotuner, name)).parameters)
