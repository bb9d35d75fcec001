"""How own C++ kernels are compiled: once for all processes, and what is said where that cannot be done."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._inductor import config

from autotuner.errors import KernelError
from autotuner.ir.records import Call, Candidate
from autotuner.kernels.cpp import compiled
from autotuner.measure.bench import Bench
from autotuner.measure.devices.cpu_sampling import CpuTimer
from autotuner.measure.policy import CpuPolicy
from tests.kernels.test_cpp import product

ONCE = """
import torch
from tests.kernels.test_cpp import faults, product
assert faults([product(5, 6, 7)]) == {}
"""


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Compile into an empty folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled.library.cache_clear()
    yield
    compiled.library.cache_clear()


def compiler(folder: Path, text: str) -> str:
    """Return a compiler that says its version, and does this when it is to compile."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo compiler 1.0; exit 0; fi\n{text}\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_processes_that_compile_at_once_leave_one_file_and_all_compute(tmp_path: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", ONCE]) for _ in range(2)]
    assert [each.wait(300) for each in running] == [0, 0]
    (made,) = (tmp_path / "autotuner").iterdir()
    assert made.name.startswith("matmul-")
    written = made.stat().st_mtime_ns
    compiled.library("matmul")
    assert made.stat().st_mtime_ns == written


@pytest.mark.slow
def test_other_flags_sources_and_compilers_are_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.library("matmul")
    for name, value in (("ARCHITECTURE", ()), ("_version", lambda _: "another one"), ("_processor", lambda: "another")):
        monkeypatch.setattr(compiled, name, value)
        compiled.library.cache_clear()
        compiled.library("matmul")
    sources = tmp_path / "sources"
    sources.mkdir()
    for path in compiled.SOURCES.iterdir():
        if path.suffix in (".h", ".cpp"):
            (sources / path.name).write_text(path.read_text() + "\n")
    monkeypatch.setattr(compiled, "SOURCES", sources)
    compiled.library.cache_clear()
    compiled.library("matmul")
    assert len(list((tmp_path / "autotuner").iterdir())) == 5


@pytest.mark.slow
def test_without_a_compiler_a_call_is_refused_with_the_reason_and_others_are_timed() -> None:
    own = product(5, 6, 7)
    torchs = Call(own.subgraph, Candidate("torch_matmul", own.candidate.forms))
    found = {}
    with config.patch({"cpp.cxx": ("/nowhere/g++",)}):
        Bench(CpuTimer(CpuPolicy(4096)), 1 << 30).race(
            [own, torchs], lambda _index, _own: None, lambda index, measured: found.update({index: measured})
        )
    assert found[0].status == "refused"
    assert found[0].message == "own CPU kernels need a C++ compiler, and none was found: install g++, or set CXX"
    assert found[1].status == "ok"


@pytest.mark.parametrize(
    "does, said",
    [
        ("echo warning: old >&2; echo 'x.cpp:1: error: no such option' >&2; exit 1", "x.cpp:1: error: no such option"),
        ("exit 3", "exit code 3"),
    ],
)
def test_a_compiler_that_fails_says_why_and_leaves_nothing(tmp_path: Path, does: str, said: str) -> None:
    own = compiler(tmp_path, does)
    with (
        config.patch({"cpp.cxx": (own,)}),
        pytest.raises(KernelError, match=f"{own} cannot compile matmul.cpp: {said}"),
    ):
        compiled.library("matmul")
    assert list((tmp_path / "autotuner").iterdir()) == []


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    own = compiler(tmp_path, 'shift $(($# - 2)); echo text > "$1"')
    said = f"what {own} made of matmul.cpp cannot be loaded: "
    with config.patch({"cpp.cxx": (own,)}), pytest.raises(KernelError, match=said):
        compiled.library("matmul")
