"""The script of faults: its cluster has a token of its own, and a head that does not start ends it."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from scripts.bench.supervised import Supervised

ROOT = Path(__file__).parents[2]


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = SourceFileLoader("chaos", str(ROOT / "scripts" / "chaos"))
    spec = spec_from_loader("chaos", loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "chaos", module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


def test_a_head_that_does_not_start_ends_it_with_its_last_words(chaos: ModuleType, tmp_path: Path) -> None:
    fleet = chaos.Fleet(tmp_path, "sqlite://", "tiny", 0.0, hosts=1, gpus=1)
    assert len(fleet.environment["RAY_AUTH_TOKEN"]) == 64
    command = ["sh", "-c", "echo its port is taken; exit 1"]
    fleet.head = Supervised(command, fleet.environment, tmp_path / "head.log", pause_s=0.01)
    with pytest.raises(SystemExit, match="chaos: the head did not start: its port is taken"), fleet.running():
        pass
