"""Measuring on a CUDA device, for real: planted kernels end as their status, their neighbours are timed."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotuner.ir.records import Call, Candidate, Measurement, Node, Subgraph, TensorType
from autotuner.kernels.registry import KERNELS
from autotuner.measure import CudaPolicy, Measurer, lock_path
from autotuner.measure.child import load_modules
from autotuner.measure.devices.cuda import CudaDevice
from autotuner.measure.roofline import work_of

TIMEOUT_S = 4.0
NOISE_SHARE = 0.05
PLANTED_CUDA = str(Path(__file__).with_name("planted_cuda_kernels.py"))
MakeCall = Callable[..., Call]
RACE = (
    "good", "not_a_number", "unwritten", "modifies", "raises", "waits", "greedy_on_device", "shares_too_much",
    "reads_beyond", "reads_beyond_later", "hangs_on_device", "refused", "roomy_on_device", "repeats",
)  # fmt: skip

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def planted_cuda(planted: str) -> Iterator[list[str]]:
    known = {kernel.name for kernel in KERNELS}
    load_modules([PLANTED_CUDA])
    yield [planted, PLANTED_CUDA]
    for name in {kernel.name for kernel in KERNELS} - known:
        del KERNELS._kernels[name]
    del sys.modules["planted_cuda_kernels"]


@pytest.fixture(scope="module")
def measurer(planted_cuda: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measurer]:
    cache = tmp_path_factory.mktemp("cache")
    with Measurer(timeout_s=TIMEOUT_S, device_type="cuda", cache_dir=cache, modules=planted_cuda) as measurer:
        yield measurer


@pytest.fixture(scope="module")
def results(measurer: Measurer, add: MakeCall) -> dict[str, Measurement]:
    """One race over a kernel of each fault, and the good one by transposed layout as well."""
    transposed = add("good", ("ba", "ba", "ba"))
    race = [*(add(name) for name in RACE), transposed]
    found = {
        f"{call.candidate.kernel.removeprefix('planted_')}{' ba' if call.key == transposed.key else ''}": measurement
        for call, measurement in measurer.measure([race])
    }
    assert len(found) == len(race)
    return found


@pytest.mark.parametrize(
    ("kernel", "status", "sentence"),
    [
        ("not_a_number", "wrong", "is nan in 1 of 128 elements"),
        ("unwritten", "wrong", "is nan in 16 of 128 elements"),
        ("modifies", "wrong", "it modified input 1"),
        ("raises", "error", "ValueError: planted"),
        ("waits", "refused", "it cannot be captured in a CUDA graph"),
        ("greedy_on_device", "out_of_memory", "out of memory"),
        ("shares_too_much", "error", "INVALID_VALUE"),
        ("reads_beyond", "crashed", "illegal memory access"),
        ("reads_beyond_later", "crashed", "illegal memory access"),
        ("hangs_on_device", "timeout", "no result after 4 s"),
        ("refused", "refused", "it is planted to refuse"),
    ],
)
def test_a_planted_fault_ends_as_its_status(
    results: dict[str, Measurement], kernel: str, status: str, sentence: str
) -> None:
    if kernel == "shares_too_much":
        pytest.importorskip("cupy")
    assert (results[kernel].status, results[kernel].message) == (status, results[kernel].message)
    assert sentence in results[kernel].message
    assert results[kernel].samples_us == ()


@pytest.mark.parametrize("kernel", ["good", "good ba", "roomy_on_device", "repeats"])
def test_neighbours_of_a_fault_are_timed(results: dict[str, Measurement], kernel: str) -> None:
    measured = results[kernel]
    assert measured.status == "ok", measured.message
    assert measured.low_us is not None
    assert measured.high_us is not None
    assert measured.median_us is not None
    assert 0 < measured.low_us <= measured.median_us <= measured.high_us
    print(f"{kernel}: {measured.median_us:.3f} us, {measured.low_us:.3f} to {measured.high_us:.3f}")


def test_ten_calls_take_longer_than_one(results: dict[str, Measurement]) -> None:
    """By far: otherwise it is not the device's work that is timed."""
    one_us, ten_us = results["good"].median_us, results["repeats"].median_us
    assert one_us is not None
    assert ten_us is not None
    assert ten_us > 3 * one_us


def test_what_a_kernel_allocates_on_the_device_is_its_workspace(results: dict[str, Measurement]) -> None:
    assert results["good"].workspace_bytes == 0
    assert results["roomy_on_device"].workspace_bytes == 8 * 16 * 4


def test_two_identical_calls_differ_by_little(measurer: Measurer) -> None:
    found = measurer.noise_floor()
    print(f"noise floor {found:.4%}")
    assert 0 <= found < NOISE_SHARE


def test_ceilings_bound_what_was_measured(measurer: Measurer, results: dict[str, Measurement], add: MakeCall) -> None:
    ceilings = measurer.ceilings(["bfloat16"])
    rungs = ceilings.products["bfloat16"].rungs
    print(f"least call {ceilings.call_us:.2f} us; ladders {ceilings.moved.rungs[-1]}, {rungs[-1]}")
    measured_us = results["good"].median_us
    assert measured_us is not None
    assert 0 < ceilings.optimistic_us(work_of(add("good"))) < 2 * measured_us
    assert rungs[-1][0] == 2 * 8192**3


def test_masks_are_drawn_from_the_devices_generator_and_captured(measurer: Measurer) -> None:
    mask = TensorType((64, 64), "float32")
    subgraph = Subgraph((Node("dropout_mask", "->ab", (), (0,), (("p", 0.25),)),), (mask,), (), (0,))
    calls = [Call(subgraph, Candidate(f"planted_{name}", ("ab",))) for name in ("draws", "draws_too_few")]
    found = [measured.status for _, measured in measurer.measure([calls])]
    assert sorted(found) == ["ok", "wrong"]


def test_without_graphs_what_cannot_be_captured_is_timed_as_well(
    planted_cuda: list[str], tmp_path: Path, add: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaDevice, "policy", lambda *_: CudaPolicy(0, graphs=False))
    with Measurer(device_type="cuda", cache_dir=tmp_path, modules=planted_cuda) as measurer:
        found = [measured.status for _, measured in measurer.measure([[add("good"), add("waits")]])]
    assert found == ["ok", "ok"]


def test_the_environment_knows_the_device_and_the_lock_which_one(measurer: Measurer) -> None:
    facts = dict(measurer.environment.facts)
    print(facts)
    assert {"capability", "cuda", "driver", "l2_bytes", "multiprocessors", "torch", "triton"} <= facts.keys()
    # Timings, and which algorithm has which number, are of a library's version.
    assert int(facts["cublaslt"]) > 120_000
    assert int(facts["cudnn"]) > 90_000
    assert dict(measurer.environment.policy)["name"] == "cuda"
    assert "GPU-" in lock_path("cuda")
    assert "GPU-" not in str(facts)
