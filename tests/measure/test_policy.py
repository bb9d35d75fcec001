"""Policies: what is part of an environment's key."""

from typing import Any

import pytest

from autotuner.errors import DeviceError, InputError
from autotuner.ir.graph import Graph
from autotuner.measure import devices as module
from autotuner.measure.devices import cuda, policy_for, rotate_bytes
from autotuner.measure.devices.cpu import CpuDevice
from autotuner.measure.devices.cuda import CudaDevice, cuda_rotate_bytes
from autotuner.measure.devices.device import Device
from autotuner.measure.policy import CpuPolicy, CudaPolicy, Policy

H200_L2_BYTES = 60 << 20


def test_the_cpus_facts_are_those_that_databases_hold() -> None:
    assert CpuPolicy(4096).facts() == {
        "name": "cpu-rotate", "rotate_bytes": 4096, "sets": 16, "sample_us": 200.0, "single_us": 20_000.0,
        "apart_us": 1_000.0, "half_rows": 32, "samples_min": 3, "samples_max": 10, "race_s": 5.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "policy"),
    [(CpuDevice, CpuPolicy(4096, sets=3)), (CudaDevice, CudaPolicy(4096)), (CudaDevice, CudaPolicy(0, graphs=False))],
)
def test_a_policy_comes_back_from_its_facts(device: type[Device], policy: Policy) -> None:
    facts: dict[str, Any] = policy.facts()
    assert device.policy_type(**facts) == policy


def test_graphs_or_none_is_part_of_the_key() -> None:
    assert CudaPolicy(0).facts() != CudaPolicy(0, graphs=False).facts()


def test_less_than_no_bytes_is_refused() -> None:
    with pytest.raises(InputError, match="rotate_bytes is -1"):
        CudaPolicy(-1)


def test_beyond_two_second_level_caches_there_is_only_memory() -> None:
    assert cuda_rotate_bytes(H200_L2_BYTES) == 128 << 20
    assert cuda_rotate_bytes(64 << 20) == 128 << 20


def test_a_small_step_is_timed_in_cache_and_a_large_one_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.FOUND, "cuda", lambda: [CudaDevice("cuda", "H200")])
    monkeypatch.setattr(cuda, "cuda_l2_bytes", lambda _: H200_L2_BYTES)
    graph = Graph.__new__(Graph)
    monkeypatch.setattr(module, "working_set_bytes", lambda _: 10 << 20)
    assert rotate_bytes(graph, "cuda") == 4 << 20
    monkeypatch.setattr(module, "working_set_bytes", lambda _: 1 << 30)
    assert rotate_bytes(graph, "cuda") is None
    assert policy_for("cuda") == CudaPolicy(128 << 20)


def test_no_policy_is_for_a_device_that_is_not_here() -> None:
    with pytest.raises(DeviceError, match="no device 'abacus' here"):
        policy_for("abacus")
