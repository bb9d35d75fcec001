"""What the benchmark reads of the profiler's output, and what its page says of it."""

from pathlib import Path
from typing import Any

import pytest

from scripts.bench import layer_cuda_dram
from scripts.bench.layer_cuda import dram
from scripts.bench.layer_cuda_dram import (
    READ,
    WRITTEN,
    NotCounted,
    Traffic,
    by_step,
    complaint,
    counted,
    lines,
    parsed,
    profiler,
    ran,
    run_counted,
)
from scripts.bench.profiled_sides import Side

# As Nsight Compute 2025.3 writes it, with two of its columns about the device instead of 250.
LOG = f"""==WARNING== Note: Running with uncontrolled GPU caches. Profiling results may be inconsistent.
==PROF== Connected to process 1453 (/usr/bin/python3.12)
==PROF== Disconnected from process 1453
"ID","Process ID","thread Domain:Push/Pop_Range:PL_Type","Kernel Name","Device","CC","{READ}","{WRITTEN}"
"","","","","","","byte","byte"
"0","1453","","void at::native::copy","0","9.0","10","1"
"1","1453","1453  ""<default domain>:counted side 0:none","counted side 0 step 0/a,b","0","9.0","3,698,944","15,639,808"
"2","1453","1453  ""<default domain>:counted side 0:none","counted side 0 step 11/red","0","9.0","4","6"
"3","1453","1453  ""<default domain>:counted side 0 step 11:none","counted side 0/per","0","9.0","8","2"
"4","1453","1453  ""<default domain>:counted side 12:none","counted side 12/add","0","9.0","5","7"
"""
EMPTY = f'"Kernel Name","{READ}","{WRITTEN}"\n"","byte","byte"\n'
REFUSED = "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n"


SIDES = [Side("large", name, "BertLayer", "large.json") for name in ("tuned", "eager", "torch.compile")]


def test_each_kernel_has_its_bytes_and_the_side_and_step_that_it_ran_for() -> None:
    assert parsed(LOG) == [
        Traffic(0, 0, 3_698_944, 15_639_808), Traffic(0, 11, 4, 6), Traffic(0, 11, 8, 2), Traffic(12, None, 5, 7)
    ]  # fmt: skip


def test_a_step_moves_what_its_kernels_move_and_is_averaged() -> None:
    assert by_step(parsed(LOG), 2) == {0: 9_669_376, 11: 10}


@pytest.mark.parametrize("text", ["", "==PROF== Connected\n", EMPTY])
def test_a_log_without_kernels_says_so(text: str) -> None:
    with pytest.raises(NotCounted, match="no kernels"):
        parsed(text)


def test_other_units_than_bytes_are_refused() -> None:
    with pytest.raises(NotCounted, match="in Kbyte and byte"):
        parsed(LOG.replace('"byte","byte"', '"Kbyte","byte"'))


def test_the_profilers_first_error_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert complaint(LOG) is None
    monkeypatch.setattr(layer_cuda_dram, "ran", lambda _: (0, REFUSED, ""))
    with pytest.raises(NotCounted, match=r"^ERR_NVGPUCTRPERM - no permission$"):
        run_counted("ncu", SIDES)
    monkeypatch.setattr(layer_cuda_dram, "ran", lambda _: (1, "", "Traceback\nno such layer"))
    with pytest.raises(NotCounted, match=r"^no such layer$"):
        run_counted("ncu", SIDES)


def test_a_program_that_takes_too_long_is_ended_with_what_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran(["sh", "-c", "echo out; echo err >&2; exit 3"]) == (3, "out\n", "err\n")
    monkeypatch.setattr(layer_cuda_dram, "LIMIT_S", 0.2)
    with pytest.raises(NotCounted, match=r"more than 0\.2 s"):
        ran(["sh", "-c", "sleep 600 & wait"])  # its output is held open until the sleep is gone as well
    with pytest.raises(NotCounted, match="no-such-program could not be started"):
        ran(["no-such-program"])


def test_each_side_has_its_own_kernels_and_one_that_fails_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: str, __: list[Side]) -> tuple[list[Traffic], dict[int, str]]:
        return [Traffic(0, 0, 30, 60), Traffic(0, None, 3, 6), Traffic(2, None, 1, 2)], {1: "out of memory"}

    monkeypatch.setattr(layer_cuda_dram, "profiler", lambda: "ncu")
    monkeypatch.setattr(layer_cuda_dram, "run_counted", run)
    assert counted(SIDES) == {
        "large": {
            "sides": {
                "tuned": {"read_bytes": 33, "written_bytes": 66},
                "torch.compile": {"read_bytes": 1, "written_bytes": 2},
            },
            "steps": {0: 90},
            "reason": "eager: out of memory",
        }
    }


def test_the_profiler_on_path_goes_before_those_in_usual_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for version in ("2024.1", "2025.3"):
        file = tmp_path / version / "ncu"
        file.parent.mkdir()
        file.touch(0o755)
    monkeypatch.setattr(layer_cuda_dram, "PLACES", ("no/such/place", f"{tmp_path.relative_to('/')}/*/ncu"))
    monkeypatch.setenv("PATH", "")
    assert profiler() == str(tmp_path / "2025.3" / "ncu")
    monkeypatch.setenv("PATH", str(tmp_path / "2024.1"))
    assert profiler() == str(tmp_path / "2024.1" / "ncu")


def test_without_a_profiler_nothing_is_counted_and_the_page_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_cuda_dram, "profiler", lambda: None)
    found = counted(SIDES)["large"]
    assert (found["sides"], found["steps"]) == ({}, {})
    (line,) = dram(row(found))
    assert line.startswith("Not all bytes through DRAM were counted: ncu")
    assert dram(row(None)) == ["Bytes through DRAM were not counted."]


def row(found: dict[str, Any] | None) -> dict[str, Any]:
    return {"dram": found, "bytes_moved": {"chosen": 10 << 20}}


@pytest.mark.parametrize(("read_mib", "words"), [(5, "40% less"), (12, "30% more")])
def test_the_page_compares_counted_operands_with_dram(read_mib: int, words: str) -> None:
    sides: dict[str, Any] = {"tuned": {"read_bytes": read_mib << 20, "written_bytes": 1 << 20}}
    said = dram(row({"sides": sides, "reason": None}))
    assert f"| tuned | {read_mib}.0 | 1.0 | {read_mib + 1}.0 |" in said
    assert words in said[-1]


def test_the_page_compares_the_tuned_layer_with_eager_and_with_the_peer() -> None:
    moved = {"tuned": 76, "eager": 100, "torch.compile": 70}
    sides = {name: {"read_bytes": value, "written_bytes": 0} for name, value in moved.items()}
    said = lines({"sides": sides, "reason": None})
    assert "Tuned against eager: 24.00% fewer bytes; at least 22.91% fewer is the goal: reached." in said
    assert "Tuned against torch.compile: 8.57% more bytes; at least 0.00% fewer is the goal: missed." in said
