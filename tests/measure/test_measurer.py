"""The measuring process, for real: planted kernels, each of which ends as its status while its neighbours survive."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from autotuner.checkpoint import watched
from autotuner.errors import DeviceError, InputError, MeasureError
from autotuner.ir.records import Call, Measurement
from autotuner.measure import Measurer, lock_path, locked
from autotuner.measure import compilers as compilers_module
from autotuner.measure import measurer as measurer_module
from autotuner.measure.devices.cpu import CpuDevice
from autotuner.measure.process import Child

pytestmark = pytest.mark.slow

TIMEOUT_S = 2.0
PATIENCE_S = 60.0
MakeCall = Callable[..., Call]
RACE = ("good", "slow", "wrong", "modifies", "raises", "hangs", "segfaults", "exits", "greedy", "refused")


def gone(process_id: int, within_s: float = 10.0) -> bool:
    """Wait for a process to end; a zombie, which its adoptive parent has yet to collect, has ended."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def measurer(planted: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measurer]:
    cache = tmp_path_factory.mktemp("cache")
    with Measurer(timeout_s=TIMEOUT_S, cache_dir=cache, modules=[planted], threads=1) as measurer:
        yield measurer


@pytest.fixture(scope="module")
def results(measurer: Measurer, add: MakeCall) -> dict[str, Measurement]:
    """One race over a kernel of each fault, and the good one twice: by declared and by transposed layout."""
    transposed = add("good", ("ba", "ba", "ba"))
    race = [*(add(name) for name in RACE), transposed, add("good")]
    found = [
        (f"{call.candidate.kernel.removeprefix('planted_')}{' ba' if call.key == transposed.key else ''}", measurement)
        for call, measurement in measurer.measure([race])
    ]
    assert len(found) == len(RACE) + 1
    return dict(found)


@pytest.mark.parametrize(
    ("kernel", "status", "sentence"),
    [
        ("wrong", "wrong", "output 0 differs from the reference in 1 of 128 elements"),
        ("modifies", "wrong", "it modified input 1"),
        ("raises", "error", "ValueError: planted"),
        ("hangs", "timeout", "no result after 2 s"),
        ("segfaults", "crashed", "killed by SIGSEGV"),
        ("exits", "crashed", "exited with code 7"),
        ("greedy", "out_of_memory", "can't allocate memory"),
        ("refused", "refused", "it is planted to refuse"),
    ],
)
def test_a_planted_fault_ends_as_its_status(
    results: dict[str, Measurement], kernel: str, status: str, sentence: str
) -> None:
    assert results[kernel].status == status
    assert sentence in results[kernel].message
    assert results[kernel].samples_us == ()


def test_neighbours_of_a_fault_are_timed(results: dict[str, Measurement]) -> None:
    for kernel in ("good", "good ba"):
        measured = results[kernel]
        assert measured.status == "ok"
        assert measured.low_us is not None
        assert measured.high_us is not None
        assert measured.median_us is not None
        assert 0 < measured.low_us <= measured.median_us <= measured.high_us
        assert 3 <= len(measured.samples_us) <= 10


def test_a_slow_candidate_is_dropped_with_the_samples_that_it_has(results: dict[str, Measurement]) -> None:
    slow = results["slow"]
    assert slow.status == "ok"
    assert len(slow.samples_us) >= 2, "a single look decides nothing"
    assert "eliminated" in slow.marks
    assert slow.median_us is not None
    assert slow.median_us > 2000


def test_a_call_that_ends_the_process_once_is_measured_the_second_time(
    measurer: Measurer, add: MakeCall, tmp_path: Path
) -> None:
    call = add("exits_once", mark=str(tmp_path / "mark"))
    assert [measured.status for _, measured in measurer.measure([[call]])] == ["ok"]


def test_a_result_arrives_before_the_race_is_over_and_leaving_early_harms_nothing(
    measurer: Measurer, add: MakeCall
) -> None:
    stream = measurer.measure([[add("wrong"), add("hangs")]])
    first, measured = next(stream)
    assert (first.candidate.kernel, measured.status) == ("planted_wrong", "wrong")
    stream.close()  # type: ignore[attr-defined]
    assert measurer.process_id is None
    assert [measured.status for _, measured in measurer.measure([[add("good")]])] == ["ok"]


def test_a_process_killed_from_outside_is_replaced(measurer: Measurer, add: MakeCall) -> None:
    assert measurer.noise_floor() >= 0
    before = measurer.process_id
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert gone(before)
    assert [measured.status for _, measured in measurer.measure([[add("good")]])] == ["ok"]
    assert measurer.process_id not in (None, before)


def test_compiling_kernels_are_built_ahead_and_their_faults_are_statuses(
    planted: str, add: MakeCall, tmp_path: Path
) -> None:
    names = ("good", "good_compiled", "raises_compiled", "exits_compiled", "hangs_compiled")
    with Measurer(timeout_s=0.5, cache_dir=tmp_path, modules=[planted], threads=1) as measurer:
        built = {
            call.candidate.kernel.removeprefix("planted_"): measurement and (measurement.status, measurement.message)
            for call, measurement in measurer.prepare([add(name) for name in names])
        }
    assert built == {
        "good_compiled": None,
        "raises_compiled": ("error", "RuntimeError: the compiler found nothing good"),
        "exits_compiled": ("crashed", "the process was lost: exited with code 9"),
        "hangs_compiled": ("timeout", "no result after 2 s"),
    }


def test_calls_are_compiled_while_others_race_and_what_a_question_interrupts_is_compiled_after_it(
    planted: str, add: MakeCall, tmp_path: Path
) -> None:
    names = ("good_compiled", "raises_compiled", "exits_compiled", "hangs_compiled")
    found: dict[str, str | None] = {}
    timed: list[str] = []
    with Measurer(timeout_s=0.5, cache_dir=tmp_path, modules=[planted], threads=1) as measurer:
        measurer.compile_beside([add(name) for name in names])
        assert measurer.compilers > 0
        assert measurer.noise_floor() >= 0
        assert measurer.compilers == 0, "a question has the device to itself"

        def races() -> Iterator[list[Call]]:
            yield [add("good")]
            while len(found) < len(names):
                for call, problem in measurer.take_compiled():
                    found[call.candidate.kernel.removeprefix("planted_")] = None if problem is None else problem.status
                yield []
            yield [add("good_compiled")]

        for call, measured in measurer.measure(races()):
            assert measured.status == "ok"
            timed.append(call.candidate.kernel)
    assert timed == ["planted_good", "planted_good_compiled"]
    assert found == {
        "good_compiled": None, "raises_compiled": "error", "exits_compiled": "crashed", "hangs_compiled": "timeout",
    }  # fmt: skip


def test_while_nothing_is_left_to_time_the_measuring_process_imports_what_is_being_compiled(
    planted: str, add: MakeCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported_by = tmp_path / "imported_by"
    monkeypatch.setenv("PLANTED_LATE", str(imported_by))
    with Measurer(timeout_s=PATIENCE_S, cache_dir=tmp_path, modules=[planted], threads=1) as measurer:
        measurer.start()
        measurer.compile_beside([add("late_compiled")])

        def races() -> Iterator[list[Call]]:
            until = time.monotonic() + PATIENCE_S
            while str(measurer.process_id) not in (imported_by.read_text() if imported_by.exists() else "").split():
                assert time.monotonic() < until
                yield []
            yield [add("late_compiled"), add("good")]

        assert [measured.status for _, measured in measurer.measure(races())] == ["ok", "ok"]


def test_a_measuring_process_that_is_lost_while_it_rests_is_replaced(
    planted: str, add: MakeCall, tmp_path: Path
) -> None:
    with Measurer(timeout_s=5, cache_dir=tmp_path, modules=[planted], threads=1) as measurer:
        measurer.start()
        number = measurer.process_id
        assert number is not None
        os.kill(number, signal.SIGKILL)
        assert gone(number)
        measurer.compile_beside([add("good_compiled")])
        assert [measured.status for _, measured in measurer.measure([[], [add("good")]])] == ["ok"]
        assert measurer.process_id != number


def test_a_compiling_process_that_does_not_start_is_an_error_and_the_next_request_starts_another(
    planted: str, add: MakeCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Child.started

    def refused(child: Child) -> None:
        child.kill()
        raise MeasureError("the measuring process did not start: no memory")

    with Measurer(timeout_s=5, cache_dir=tmp_path, modules=[planted], threads=1) as measurer:
        measurer.start()
        monkeypatch.setattr(Child, "started", refused)
        measurer.compile_beside([add("good_compiled")])
        with pytest.raises(MeasureError, match="did not start: no memory"):
            list(measurer.measure([[]] * 1000))
        assert measurer.compilers == 0
        monkeypatch.setattr(Child, "started", real)
        found: list[Measurement | None] = []

        def races() -> Iterator[list[Call]]:
            while not found:
                found.extend(problem for _, problem in measurer.take_compiled())
                yield []
            yield [add("good_compiled")]

        assert [measured.status for _, measured in measurer.measure(races())] == ["ok"]
        assert found == [None]


def test_what_is_asked_for_later_is_compiled_first_and_nothing_ends_it_all(
    planted: str, add: MakeCall, tmp_path: Path
) -> None:
    with Measurer(timeout_s=5, cache_dir=tmp_path, modules=[planted], threads=1) as measurer:
        measurer.compile_beside([add("good_compiled", place=str(place)) for place in range(8)])
        measurer.compile_beside([add("good_compiled", place="last")])
        found: list[Call] = []

        def races() -> Iterator[list[Call]]:
            while not found:
                found.extend(call for call, _ in measurer.take_compiled())
                yield []

        assert list(measurer.measure(races())) == []
        assert found == [add("good_compiled", place="last")]
        measurer.compile_beside([add("hangs_compiled")])
        measurer.compile_beside(())
        assert measurer.compilers == 0


def test_compiling_processes_stay_for_the_next_calls_and_one_that_is_lost_meanwhile_is_replaced(
    planted: str, add: MakeCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []
    real = Child.started

    def noted(child: Child) -> None:
        numbers.append(child.process_id)
        real(child)

    monkeypatch.setattr(Child, "started", noted)
    with Measurer(timeout_s=5, cache_dir=tmp_path, modules=[planted], threads=1) as measurer:
        calls = [add("good_compiled", place=str(place)) for place in range(3)]
        assert [built for _, built in measurer.prepare(calls)] == [None] * 3
        compiling = list(numbers)
        assert [measured.status for _, measured in measurer.measure([[add("good")]])] == ["ok"]
        assert measurer.process_id not in compiling
        assert [built for _, built in measurer.prepare(calls[:1])] == [None]
        assert numbers == [*compiling, measurer.process_id]
        os.kill(compiling[-1], signal.SIGKILL)
        assert gone(compiling[-1])
        assert [built for _, built in measurer.prepare(calls)] == [None] * 3
        measurer.noise_floor()
        assert all(gone(number) for number in numbers if number != measurer.process_id)


def test_a_call_whose_compilation_ends_at_once_is_not_lost(
    planted: str, add: MakeCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine, where a process answers before anybody waits for it."""

    def patient(connections: Sequence[Connection], _: float) -> list[Any]:
        return wait(connections, PATIENCE_S)

    monkeypatch.setattr(compilers_module, "wait", patient)
    with Measurer(timeout_s=5, cache_dir=tmp_path, modules=[planted], threads=1) as measurer:
        for _ in range(2):
            assert [built for _, built in measurer.prepare([add("good_compiled")])] == [None]


def test_compiling_processes_that_rest_are_ended_before_the_next_race(
    planted: str, add: MakeCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurer_module, "COMPILERS_REST_S", 0.0)
    with Measurer(timeout_s=5, cache_dir=tmp_path, modules=[planted], threads=1) as measurer:
        assert [built for _, built in measurer.prepare([add("good_compiled")])] == [None]
        assert measurer.compilers == 1
        assert [measured.status for _, measured in measurer.measure([[add("good")]])] == ["ok"]
        assert measurer.compilers == 0


def test_a_process_that_is_begun_takes_timings_under_the_policy_that_is_known_later(
    planted: str, add: MakeCall, tmp_path: Path
) -> None:
    """A call's operands take 1,536 bytes: they rotate through as many sets as make their sum exceed what is asked."""
    with Measurer(timeout_s=30, cache_dir=tmp_path, modules=[planted], threads=1, rotate_bytes=0) as measurer:
        measurer.begin_measuring()
        begun = measurer.process_id
        assert begun is not None
        assert measurer.compilers == 0
        first = measurer.environment
        built = []
        for rotate_bytes, name in ((0, "one"), (6_000, "four"), (0, "one again")):
            measurer.rotate(rotate_bytes)
            call = add("counted", mark=str(tmp_path / name))
            assert [measured.status for _, measured in measurer.measure([[call]])] == ["ok"]
            built.append(len((tmp_path / name).read_text()))
        assert built == [1, 4, 1]
        assert measurer.process_id == begun
        assert measurer.environment == first
        measurer.rotate(6_000)
        assert dict(measurer.environment.policy)["rotate_bytes"] == 6_000
        assert measurer.environment.key != first.key


def test_processes_that_compile_are_all_told_to_end_before_the_first_is_waited_for() -> None:
    told: list[str] = []

    class Resting:
        def signal(self) -> None:
            told.append("signal")

        def kill(self) -> None:
            told.append("kill")

    pool = compilers_module.CompilerPool({}, 3, lambda _waited_s, _words: None)
    pool._idle += [Resting(), Resting()]  # type: ignore[list-item]
    pool._busy[Resting()] = None  # type: ignore[index]
    pool.close()
    assert told == ["signal"] * 3 + ["kill"] * 3
    assert pool.count == 0


def test_a_process_that_cannot_be_begun_is_started_by_the_request(
    planted: str, add: MakeCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> Child:
        raise BlockingIOError

    with Measurer(timeout_s=5, cache_dir=tmp_path, modules=[planted], threads=1) as measurer:
        with monkeypatch.context() as patch:
            patch.setattr(measurer_module, "Child", none_left)
            measurer.begin()
        assert measurer.process_id is None
        assert [measured.status for _, measured in measurer.measure([[add("good")]])] == ["ok"]


def test_compiling_processes_that_are_begun_compile_what_comes_later(
    planted: str, add: MakeCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Child] = []

    class Counted(Child):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            begun.append(self)

    monkeypatch.setattr(compilers_module, "Child", Counted)
    monkeypatch.setattr(compilers_module, "EARLY", 1)
    monkeypatch.setattr(CpuDevice, "compiles_beside", True)
    with Measurer(timeout_s=5, cache_dir=tmp_path, modules=[planted], threads=1) as measurer:
        assert measurer.compilers == 0
        measurer.begin()
        measurer.begin()
        assert measurer.compilers == len(begun) == 1
        assert [built for _, built in measurer.prepare([add("good_compiled")])] == [None]
        assert len(begun) == 1
        assert measurer.process_id is not None
    assert all(gone(child.process_id, within_s=0.1) for child in begun)


def test_the_process_dies_with_its_parent(planted: str, tmp_path: Path) -> None:
    program = f"""
from autotuner.measure import Measurer
from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
tensor = TensorType((8, 16), "float32")
subgraph = Subgraph((Node("add", "ab,ab->ab", (0, 1), (2,)),), (tensor,) * 3, (0, 1), (2,))
with Measurer(timeout_s=60, cache_dir={str(tmp_path)!r}, modules=[{planted!r}], threads=1) as measurer:
    call = lambda name: Call(subgraph, Candidate("planted_" + name, ("ab", "ab", "ab")))
    for _ in measurer.measure([[call("wrong"), call("hangs")]]):
        print(measurer.process_id, flush=True)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
        assert not gone(child, within_s=0.1)
        parent.kill()
        parent.wait()
    assert gone(child)


def test_a_process_that_cannot_start_says_why(planted: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken_in_the_child.py"
    broken.write_text("")
    with Measurer(cache_dir=tmp_path, modules=[planted, str(broken)], threads=1) as measurer:
        broken.write_text("raise RuntimeError('no such library')")
        measurer.begin()
        with pytest.raises(MeasureError, match="no such library"):
            measurer.noise_floor()
        assert measurer.process_id is None


def test_a_process_that_is_begun_measures_what_comes_and_is_killed_where_nothing_does(
    planted: str, tmp_path: Path, add: MakeCall
) -> None:
    with Measurer(cache_dir=tmp_path, modules=[planted], threads=1) as measurer:
        measurer.begin()
        begun = measurer.process_id
        measurer.begin()
        ((_, found),) = measurer.measure([[add("good")]])
        assert found.status == "ok"
        assert measurer.process_id == begun
    began = time.monotonic()
    with Measurer(cache_dir=tmp_path, modules=[planted], threads=1) as measurer:
        measurer.begin()
        begun = measurer.process_id
    assert begun is not None
    assert gone(begun, within_s=0.1)
    assert time.monotonic() - began < PATIENCE_S


def test_the_environment_holds_threads_and_policy(measurer: Measurer) -> None:
    assert dict(measurer.environment.facts)["threads"] == 1
    assert dict(measurer.environment.policy)["name"] == "cpu-rotate"
    assert "timeout_s" not in dict(measurer.environment.policy)


def test_what_cannot_be_measured_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="no device 'abacus' here"):
        Measurer(device_type="abacus", cache_dir=tmp_path)
    with pytest.raises(DeviceError, match="threads asked for"):
        Measurer(threads=100_000, cache_dir=tmp_path)
    with pytest.raises(InputError, match="timeout_s is 0"):
        Measurer(timeout_s=0, cache_dir=tmp_path)
    with pytest.raises(InputError, match="rotate_bytes is -1"):
        Measurer(rotate_bytes=-1, cache_dir=tmp_path)


class StopError(Exception):
    """Whoever watches wants no more."""


def stopping_after(seconds: float) -> Callable[[], None]:
    """Return a watch that ends the work some seconds from now."""
    ends_at = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() > ends_at:
            raise StopError

    return look


@pytest.mark.parametrize("doing", ["measure", "prepare", "ceilings", "noise_floor"])
def test_what_is_not_to_go_on_ends_at_once_with_its_processes(
    doing: str, planted: str, add: MakeCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel sleeps for ten minutes, of which a timeout allows five; ceilings and noise take seconds."""
    numbers: list[int] = []
    real = Child.send

    def noted(child: Child, message: Mapping[str, object]) -> None:
        numbers.append(child.process_id)
        real(child, message)

    monkeypatch.setattr(Child, "send", noted)
    asked: Mapping[str, Callable[[Measurer], object]] = {
        "measure": lambda measurer: list(measurer.measure([[add("hangs")]])),
        "prepare": lambda measurer: list(measurer.prepare([add("hangs_compiled")])),
        "ceilings": lambda measurer: measurer.ceilings({"float32"}),
        "noise_floor": lambda measurer: measurer.noise_floor(),
    }
    began = time.monotonic()
    with Measurer(timeout_s=300, cache_dir=tmp_path, modules=[planted], threads=1) as measurer:
        with pytest.raises(StopError), watched(stopping_after(0.5)):
            asked[doing](measurer)
        assert measurer.process_id is None
        assert numbers
        assert not any(Path(f"/proc/{number}").exists() for number in numbers)
    assert time.monotonic() - began < 60


def test_waiting_for_the_device_is_told_and_counted(measurer: Measurer, add: MakeCall) -> None:
    told: list[str] = []
    with locked(lock_path("cpu"), alone=True):
        release = threading.Event()

        def tell(words: str) -> None:
            told.append(words)
            release.set()

        measurer.hear(tell)
        found: list[Measurement] = []
        thread = threading.Thread(target=lambda: found.extend(m for _, m in measurer.measure([[add("good")]])))
        thread.start()
        assert release.wait(120)
        assert not found
    thread.join(120)
    assert [measured.status for measured in found] == ["ok"]
    assert told[0].startswith("waiting for the device, held by ")
    assert told[-1] == ""
    assert measurer.waited_s > 0


def test_whoever_is_told_of_a_wait_can_end_it(measurer: Measurer, add: MakeCall) -> None:
    def tell(_words: str) -> None:
        raise InterruptedError

    measurer.hear(tell)
    with locked(lock_path("cpu"), alone=True):
        with pytest.raises(InterruptedError):
            measurer.noise_floor()
        with pytest.raises(InterruptedError):
            list(measurer.measure([[add("good")]]))
    measurer.hear(lambda _words: None)
    assert [measured.status for _, measured in measurer.measure([[add("good")]])] == ["ok"]
