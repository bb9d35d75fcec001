"""The bench itself, in this process: what is emitted when, and what is taken again."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from autotuner.ir.records import Call, Measurement, Node, Subgraph, TensorType
from autotuner.measure import bench as module
from autotuner.measure.bench import Bench
from autotuner.measure.devices import cpu_sampling as sampling
from autotuner.measure.devices.cpu_sampling import CpuTimer
from autotuner.measure.failure import ContextLostError, RefusalError, WrongError, failure
from autotuner.measure.policy import CpuPolicy
from autotuner.measure.timer import Canary

POLICY = CpuPolicy(4096)
MakeCall = Callable[..., Call]

pytestmark = pytest.mark.usefixtures("planted")


def raced(bench: Bench, *calls: Call) -> list[tuple[int, Measurement]]:
    emitted: list[tuple[int, Measurement]] = []
    bench.race(calls, lambda _index, _own: None, lambda index, measurement: emitted.append((index, measurement)))
    return emitted


@pytest.mark.slow
def test_failures_are_emitted_at_once_and_timings_at_the_end(add: MakeCall) -> None:
    found = raced(
        Bench(CpuTimer(POLICY), 1 << 30), add("good"), add("wrong"), add("good", ("ba", "ba", "ba")), add("refused")
    )
    assert [(index, measured.status) for index, measured in found] == [
        (1, "wrong"),
        (3, "refused"),
        (0, "ok"),
        (2, "ok"),
    ]


def test_a_kernel_of_another_vendor_is_refused_before_anything_is_built(add: MakeCall) -> None:
    call = add("good")
    foreign = Call(call.subgraph, replace(call.candidate, kernel="cupy_rows"))
    ((_, measured),) = raced(Bench(CpuTimer(POLICY), 1 << 30), foreign)
    assert (measured.status, measured.message) == (
        "refused", "cupy_rows needs a device of NVIDIA, and this one's vendor is 'cpu'"
    )  # fmt: skip


@pytest.mark.slow
def test_what_a_call_allocates_while_it_runs_is_its_workspace(add: MakeCall) -> None:
    found = dict(raced(Bench(CpuTimer(POLICY), 1 << 30), add("good"), add("roomy")))
    assert found[0].workspace_bytes == 0
    assert found[1].workspace_bytes == 8 * 16 * 4


@pytest.mark.slow
def test_operand_sets_make_room_where_memory_is_short(add: MakeCall) -> None:
    found = raced(
        Bench(CpuTimer(POLICY), 1), add("good"), add("good", ("ba", "ba", "ba")), add("good", ("ab", "ab", "ba"))
    )
    assert [measured.status for _, measured in found] == ["ok"] * 3


@pytest.mark.slow
def test_what_was_sampled_while_the_machine_drifted_is_taken_again_once(
    add: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def always_drifted(_canary: Canary, share: float) -> bool:
        asked.append(share)
        return True

    monkeypatch.setattr(Canary, "drifted", always_drifted)
    samples: list[float] = []
    real = sampling.CpuSampler.look

    def look(sampler: sampling.CpuSampler) -> float:
        samples.append(real(sampler))
        return samples[-1]

    monkeypatch.setattr(sampling.CpuSampler, "look", look)
    found = raced(Bench(CpuTimer(POLICY), 1 << 30, canary_s=1e9), add("good"))
    assert [measured.status for _, measured in found] == ["ok"]
    assert asked == [module.DRIFT_SHARE] * 2
    assert len(samples) == 2
    assert "drifted" in found[0][1].marks, "it drifted the second time as well"


@pytest.mark.slow
def test_two_identical_calls_differ_little_or_much_but_not_negatively() -> None:
    assert Bench(CpuTimer(POLICY), 1 << 30).noise_floor() >= 0


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), "out_of_memory"),
        (RuntimeError("std::bad_alloc"), "out_of_memory"),
        (RuntimeError("CUDA out of memory"), "out_of_memory"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
        (RefusalError("the row is longer than the block"), "refused"),
        (WrongError("output 0 is nan"), "wrong"),
    ],
)
def test_an_exception_has_a_status_and_keeps_its_sentence(error: Exception, status: str) -> None:
    assert failure(error).status == status
    assert str(error) in failure(error).message


class Together(CpuTimer):
    """Takes samples of all that are offered, as a device does on which they are queued."""

    def __init__(self) -> None:
        super().__init__(POLICY)
        self.rounds: list[int] = []

    def samples(self, samplers: Sequence[sampling.CpuSampler]) -> list[tuple[float, float]]:
        self.rounds.append(len(samplers))
        return [sampler.sample() for sampler in samplers]


@pytest.mark.slow
def test_a_round_is_sampled_together_where_the_device_can(add: MakeCall) -> None:
    timing = Together()
    bench = Bench(timing, 1 << 30)
    timing.rounds.clear()
    found = raced(bench, add("good"), add("good", ("ba", "ba", "ba")))
    assert [measured.status for _, measured in found] == ["ok"] * 2
    assert 2 in timing.rounds


def test_a_device_that_is_lost_ends_the_race_with_what_the_device_said(
    add: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_timing: CpuTimer, error: BaseException) -> None:
        raise ContextLostError("an illegal memory access") from error

    monkeypatch.setattr(CpuTimer, "recover", lost)
    with pytest.raises(ContextLostError, match="an illegal memory access"):
        raced(Bench(CpuTimer(POLICY), 1 << 30), add("good"), add("raises"))


@pytest.mark.slow
def test_references_make_room_where_memory_is_short(add: MakeCall) -> None:
    bench, small = Bench(CpuTimer(POLICY), 1), (TensorType((2, 3), "float32"),) * 3
    other = Call(Subgraph((Node("add", "ab,ab->ab", (0, 1), (2,)),), small, (0, 1), (2,)), add("good").candidate)
    found = raced(bench, add("good"), other)
    assert [measured.status for _, measured in found] == ["ok"] * 2
    assert bench._references.held_bytes == 2 * 3 * 8


@pytest.mark.slow
def test_what_was_dropped_early_is_marked_and_has_the_least_of_at_least_two_looks(add: MakeCall) -> None:
    found = dict(raced(Bench(CpuTimer(POLICY), 1 << 30), add("good"), add("slow")))
    assert "eliminated" not in found[0].marks
    assert "eliminated" in found[1].marks
    assert len(found[1].samples_us) >= 2
    assert found[1].median_us == min(found[1].samples_us)


@pytest.mark.slow
def test_what_waited_for_a_core_all_the_time_is_marked_as_contended(
    add: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_us = iter(range(0, 10**12, 10**6))
    monkeypatch.setattr(sampling, "core_wait_us", lambda: float(next(waited_us)))
    monkeypatch.setattr(sampling, "sleep", lambda _s: None)
    (_, measured), *_ = raced(Bench(CpuTimer(POLICY), 1 << 30), add("good"))
    assert "contended" in measured.marks
    assert measured.is_doubtful


@pytest.mark.slow
def test_what_others_are_known_to_disturb_is_marked_as_contended(add: MakeCall) -> None:
    found: list[Measurement] = []
    bench = Bench(CpuTimer(POLICY), 1 << 30)
    bench.race([add("good")], lambda _i, _own: None, lambda _i, measured: found.append(measured), contended=True)
    assert "contended" in found[0].marks


@pytest.mark.slow
def test_a_quiet_measurement_has_no_marks(add: MakeCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "core_wait_us", lambda: 0.0)
    monkeypatch.setattr(Canary, "drifted", lambda _canary, _share: False)
    (_, measured), *_ = raced(Bench(CpuTimer(POLICY), 1 << 30), add("good"))
    assert measured.marks == ()
