"""scripts/bench_layer_to_layer: its page, its picture, and a run of it on a CPU."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.script import SCRIPTS, script

SCRIPT = SCRIPTS / "bench_layer_to_layer"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return script("bench_layer_to_layer")


def row(layers: int, side: str, **more: Any) -> dict[str, Any]:
    found = {"side": side, "size": "7b", "layers": layers, "sequences": 4, "cap": "16GiB", "fits": True, "ms": 500.0}
    found |= {"timed": 5, "date": "today", "commit": "abc", "note": ""}
    return found | {"allocated_bytes": layers << 28, "reserved_bytes": layers << 29} | more


def test_the_page_has_a_table_for_each_depth_and_says_what_did_not_run(bench: ModuleType, tmp_path: Path) -> None:
    about = {"device": "a device", "torch": "2.11", "length": 1024}
    rows = [row(12, "eager"), row(12, "layer to layer"), row(48, "eager", fits=False, note="out of memory")]
    lines = bench.page(about, rows).splitlines()
    assert "## 7b, 12 layers, 4,096 tokens a step, 16GiB" in lines
    assert "| layer to layer | 500.0 | 8,192 | 3072.0 | 6144.0 | 5 | today, abc |" in lines
    assert lines[-1] == "| eager | out of memory |  |  |  |  | today, abc |"
    bench.draw(rows, tmp_path / "memory.svg")
    assert "<svg" in (tmp_path / "memory.svg").read_text()


def test_the_page_says_what_was_copied_and_which_micro_batches_were_found(bench: ModuleType) -> None:
    copies = {"parameters": 1_000_000, "bytes_down": 4_000_000, "bytes_up": 2_000_000, "hidden": 0.925}
    found = row(12, "layer to layer", micro_batch=2, asked="auto", copies=copies, bound="computing")
    lines = bench.page({"device": "a device", "torch": "2.11", "length": 1024}, [found]).splitlines()
    assert "## 7b, 12 layers, 4,096 tokens a step, 16GiB, micro-batches of 2, as found by the step" in lines
    assert lines[-1] == (
        "layer to layer: the profiler counts 0.00 GB to the device and 0.00 GB back, 6.00 bytes for each of 1.0 "
        "million parameters of layers; beside 92% of the copies' time, kernels ran. Bound by computing."
    )


@pytest.mark.parametrize("begin, end, share", [(0, 10, 5), (2, 4, 1), (5, 6, 1), (11, 12, 0), (3, 20, 3)])
def test_what_runs_beside_a_copy_counts_once(bench: ModuleType, begin: float, end: float, share: float) -> None:
    """Kernels run from 1 to 3, 2 to 3 beside it, and 5 to 8."""
    assert bench.overlap(begin, end, [(1, 3), (2, 3), (5, 8)]) == share


@pytest.mark.slow
def test_a_run_finds_its_micro_batches(tmp_path: Path) -> None:
    command = [
        sys.executable, str(SCRIPT), "--device", "cpu", "--size", "small", "--layers", "2", "--length", "8",
        "--sequences", "2", "--sequences", "4", "--micro-batch", "auto", "--output", str(tmp_path), "--compiler",
        "aot_eager", "--database", str(tmp_path / "a.sqlite"), "--side", "layer to layer", "--seconds", "0",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    rows = json.loads((tmp_path / "bench_layer_to_layer_cpu.json").read_text())["rows"]
    assert [each["sequences"] for each in rows] == [2, 4]
    assert all(each["sequences"] % each["micro_batch"] == 0 and each["asked"] == "auto" for each in rows)
    assert all("which is being tried" not in each["told"] for each in rows)


def test_micro_batches_are_found_by_layer_to_layer_alone() -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--device",
        "cpu",
        "--sequences",
        "4",
        "--micro-batch",
        "auto",
        "--side",
        "eager",
    ]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert found.returncode == 2
    assert "--micro-batch auto is for --side 'layer to layer'" in found.stderr


@pytest.mark.slow
def test_a_run_measures_sides_alike(tmp_path: Path) -> None:
    command = [
        sys.executable, str(SCRIPT), "--device", "cpu", "--size", "small", "--layers", "2", "--length", "8",
        "--sequences", "4", "--micro-batch", "2", "--output", str(tmp_path), "--compiler", "aot_eager", "--database",
        str(tmp_path / "a.sqlite"), "--side", "FSDP2", "--side", "layer to layer, stash on the host",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    rows = json.loads((tmp_path / "bench_layer_to_layer_cpu.json").read_text())["rows"]
    assert [each["side"] for each in rows] == ["FSDP2", "layer to layer, stash on the host"]
    assert all(each["fits"] and each["ms"] > 0 and each["allocated_bytes"] > 1000 for each in rows)
    assert [each["micro_batch"] for each in rows] == [2, 2]
    assert rows[1]["told"].startswith("2 layers on the host, ")
    page = (tmp_path / "bench_layer_to_layer_cpu.md").read_text()
    assert "## small, 2 layers, 32 tokens a step, micro-batches of 2" in page


def test_micro_batches_divide_the_sequences_of_a_step() -> None:
    wrong = ["--sequences", "4", "--sequences", "6", "--micro-batch", "4"]
    command = [sys.executable, str(SCRIPT), "--device", "cpu", *wrong]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert found.returncode == 2
    assert "--micro-batch 4 does not divide --sequences [4, 6]" in found.stderr
