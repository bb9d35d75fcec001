"""Facts about this machine, and what is said where a device is missing."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from autotuner.errors import DeviceError
from autotuner.measure import devices
from autotuner.measure.devices import cpu, environment
from autotuner.measure.devices.cpu import compiler
from autotuner.measure.devices.cuda import CudaDevice, computes_on_cuda
from autotuner.measure.devices.nvml import Nvml


def test_the_cpu_is_always_here_and_first() -> None:
    first = devices.devices()[0]
    assert first.device_type == "cpu"
    assert first.name


def test_facts_are_sorted_and_say_what_makes_timings_comparable() -> None:
    found = devices.environment("cpu", threads=1, policy={"z": 1, "a": "x"})
    names = [name for name, _ in found.facts]
    assert names == sorted(names)
    assert {"cores", "flags", "libc", "microarchitecture", "python", "threads", "torch"} <= set(names)
    assert dict(found.facts)["threads"] == 1
    assert found.policy == (("a", "x"), ("z", 1))


def test_the_same_question_has_the_same_key_and_another_policy_another() -> None:
    assert devices.environment().key == devices.environment().key
    assert devices.environment(policy={"name": "a"}).key != devices.environment(policy={"name": "b"}).key


def test_threads_default_to_the_cores_that_may_be_used() -> None:
    assert dict(devices.environment().facts)["threads"] == cpu.cores()


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_more_threads_than_cores_or_none_are_refused(threads: int) -> None:
    with pytest.raises(DeviceError, match=f"{threads} threads asked for; this process may use"):
        devices.environment(threads=threads)


def test_a_missing_device_is_named_with_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.FOUND, "cuda", list)
    with pytest.raises(DeviceError, match=r"no device 'cuda' here; what is here: cpu \("):
        devices.environment("cuda")


def test_a_device_is_told_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.FOUND, "cuda", lambda: [CudaDevice("cuda", "A", 0), CudaDevice("cuda", "B", 1)])
    assert devices.device_of("cuda", 1).name == "B"
    with pytest.raises(DeviceError, match=r"no device 'cuda' with index 2 here; what is here: cpu .*, cuda \(B\)"):
        devices.device_of("cuda", 2)


@pytest.mark.parametrize(("hip", "told"), [(None, {}), ("6.4.43482", {"vendor": "amd"})])
def test_a_vendor_is_a_fact_only_where_it_is_not_nvidia(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, told: dict[str, str]
) -> None:
    properties = SimpleNamespace(
        major=9, minor=4, L2_cache_size=1 << 22, total_memory=1 << 36, multi_processor_count=304, uuid="1"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    facts = CudaDevice("cuda", "A").facts(None)
    assert {name: fact for name, fact in facts.items() if name == "vendor"} == told


class NVMLError(Exception):
    """What pynvml raises for what the driver or the device does not have."""


def fake_library(**more: Any) -> ModuleType:
    """pynvml as it answers where the driver knows one device, its clock and two processes."""

    def handle(uuid: str) -> str:
        if uuid != "GPU-1":
            raise NVMLError
        return "the device"

    def clock(_device: str, kind: int) -> int:
        return 1980 if kind == 1 else 0

    known = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetHandleByUUID": handle,
        "nvmlDeviceGetClockInfo": clock,
        "nvmlDeviceGetComputeRunningProcesses_v3": lambda _: [SimpleNamespace(pid=7), SimpleNamespace(pid=9)],
    }
    made = ModuleType("pynvml")
    made.__dict__.update(known | more)
    return made


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = fake_library()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


@pytest.mark.usefixtures("library")
def test_the_driver_says_version_clock_and_processes() -> None:
    management = Nvml()
    assert management.driver() == "580.1"
    assert management.sm_clock_mhz("GPU-1") == 1980
    assert management.processes("GPU-1") == [7, 9]
    assert management.sm_clock_mhz("GPU-2") is None
    assert management.processes("GPU-2") is None


def raising(*_: Any) -> NoReturn:
    raise NVMLError


def test_limits_are_facts_only_where_somebody_has_changed_them(library: Any) -> None:
    management = Nvml()
    assert management.lowered("GPU-1") == {}, "this pynvml knows no limits"
    library.nvmlDeviceGetPowerManagementLimit = library.nvmlDeviceGetPowerManagementDefaultLimit = lambda _: 700_000
    library.nvmlDeviceGetApplicationsClock, library.nvmlDeviceGetDefaultApplicationsClock = (lambda *_: 1980), raising
    assert management.lowered("GPU-1") == {}, "a GPU as its maker made it keeps the environment that it had"
    library.nvmlDeviceGetDefaultApplicationsClock = lambda *_: 1980
    assert management.lowered("GPU-1") == {}
    library.nvmlDeviceGetPowerManagementLimit = lambda _: 500_000
    assert management.lowered("GPU-1") == {"power_limit_w": 500}
    library.nvmlDeviceGetApplicationsClock = lambda *_: 1500
    assert management.lowered("GPU-1") == {"power_limit_w": 500, "sm_clock_mhz": 1500}
    assert management.lowered("GPU-2") == {}


@pytest.mark.parametrize("missing", [None, fake_library(nvmlInit=raising)], ids=["pynvml", "driver"])
def test_without_pynvml_or_the_driver_nothing_is_known(
    missing: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", missing)
    management = Nvml()
    assert management.driver() is None
    assert management.sm_clock_mhz("GPU-1") is None
    assert management.processes("GPU-1") is None
    assert management.lowered("GPU-1") == {}


@pytest.mark.parametrize(("begun", "index", "computes"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_a_process_computes_on_a_device_where_it_has_a_context(
    monkeypatch: pytest.MonkeyPatch, begun: bool, index: int, computes: bool
) -> None:
    contexts = SimpleNamespace(_cuda_hasPrimaryContext=[False, True].__getitem__)
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: begun), _C=contexts)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert computes_on_cuda(index) is computes
    monkeypatch.delitem(sys.modules, "torch")
    assert not computes_on_cuda(index)


def test_a_quota_limits_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = tmp_path / "cpu.max"
    monkeypatch.setattr(cpu, "_CPU_QUOTA", limits)
    limits.write_text("50000 100000\n")
    assert cpu.cores() == 1
    assert dict(devices.environment().facts)["cpu_quota"] == 0.5
    limits.write_text("max 100000\n")
    assert "cpu_quota" not in dict(devices.environment().facts)


def test_caches_are_read_by_level(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("2", "Instruction", "9K"), ("2", "Unified", "2M")]
    ):
        place = tmp_path / f"index{index}"
        place.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (place / name).write_text(text + "\n")
    monkeypatch.setattr(cpu, "_CACHES", tmp_path)
    assert cpu.cache_bytes(1) == 48 << 10
    assert cpu.cache_bytes(2) == 2 << 20
    assert cpu.cache_bytes(3) is None


def test_a_machine_without_those_files_still_has_an_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("_CPUINFO", "_CACHES", "_CPU_QUOTA"):
        monkeypatch.setattr(cpu, name, tmp_path / "absent")
    found = devices.environment()
    assert found.device_name
    assert "l2_bytes" not in dict(found.facts)


def test_a_missing_compiler_is_another_environment_and_a_present_one_is_no_fact(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    here = environment()
    assert "compiler" not in dict(here.facts)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert dict(environment().facts)["compiler"] == "absent"
    assert environment().key != here.key
    monkeypatch.undo()
    mine = tmp_path / "my-c++"
    mine.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(mine))
    assert compiler() == str(mine)


def test_the_cpus_environment_does_not_import_torch() -> None:
    program = (
        "import sys; from autotuner.measure.devices import environment; environment(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
