"""Measuring for the tuner: hands races to the measuring process, and outlives whatever that process does."""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

from autotuner.checkpoint import checkpoint
from autotuner.errors import InputError, MeasureError, stacklevel
from autotuner.ir.records import Call, Environment, Measurement
from autotuner.kernels.registry import KERNELS
from autotuner.measure.child import NOBODY, load_modules
from autotuner.measure.compilers import MAX_WAIT_S, CompilerPool
from autotuner.measure.devices import device_of, environment
from autotuner.measure.devices.cpu import usable_threads
from autotuner.measure.lock import lock_path
from autotuner.measure.process import Child, DiedError
from autotuner.measure.roofline import Roofline

CATALOGUE = ("autotuner.kernels.rules",)
COMPILE_FACTOR = 4.0
LOST_MAX = 3
COMPILERS_REST_S = 20.0
"""Seconds after which processes that compile nothing are ended: each holds memory, of the device as well."""

Result = tuple[Call, Measurement]


class Measurer:
    """Measures calls on one device; see `autotuner.measure` for how. A context manager: leaving it ends the process.

    Args:
        threads: how many a kernel may use; None for all cores.
        timeout_s: how long one call may take to be set up and verified, or to be sampled once.
        device_type: as torch names it, such as "cpu".
        device_index: which CUDA device.
        rotate_bytes: what operand sets of one call must add up to; None for the policy's own figure.
        cache_dir: where compiled kernels are kept; made if need be.
        modules: what registers kernels when imported: dotted names, or paths of files.
        beside: returns the number of other processes of the same owner that have a context on the device, and rest.

    Raises:
        DeviceError: no such device.
        InputError: a timeout that is not above 0.
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        timeout_s: float = 30.0,
        device_type: str = "cpu",
        device_index: int = 0,
        rotate_bytes: int | None = None,
        cache_dir: Path | str,
        modules: Sequence[str] = CATALOGUE,
        beside: Callable[[], int] = lambda: 0,
    ) -> None:
        if not 0 < timeout_s < float("inf"):
            raise InputError(f"timeout_s is {timeout_s}; write a number of seconds above 0")
        self._device, self._threads = device_of(device_type, device_index), threads
        self.rotate(rotate_bytes)
        cache = Path(cache_dir).expanduser().resolve()
        cache.mkdir(parents=True, exist_ok=True)
        self._start: dict[str, Any] = {
            "threads": usable_threads(threads),
            "timeout_s": timeout_s,
            "cache_dir": str(cache / "inductor"),
            "modules": list(modules),
            "policy": self._policy,
            "device_type": device_type,
            "device_index": device_index,
            "parent_computes": False,
            "lock": lock_path(device_type, device_index),
        }
        self._beside = beside
        self._child: Child | None = None
        self._is_started = False
        self._loaded: set[str] = set()  # kernels whose builders the measuring process was told to import
        building = {**self._start, "timeout_s": COMPILE_FACTOR * timeout_s}
        self._compilers = CompilerPool(building, self._device.compilers, self._waiting)
        self.waited_s = 0.0
        self._waited_until = monotonic()
        self._told: Callable[[str], None] = lambda _words: None
        load_modules(list(modules))

    def __enter__(self) -> "Measurer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def rotate(self, rotate_bytes: int | None) -> None:
        """Take timings from now on through operand sets of so many bytes; processes that were begun go on with that.

        Args:
            rotate_bytes: as of this class.
        """
        device, policy = self._device, self._device.policy(self._threads, rotate_bytes).facts()
        self._environment = environment(device.device_type, self._threads, policy, device.index)
        self._policy = policy

    @property
    def environment(self) -> Environment:
        """The environment of this measurer's timings: they are comparable with others of the same."""
        return self._environment

    @property
    def devices(self) -> int:
        """One device is timed on."""
        return 1

    @property
    def process_id(self) -> int | None:
        """The measuring process's number, None while there is none."""
        return self._child.process_id if self._child else None

    @property
    def compilers(self) -> int:
        """The number of processes that compile, or rest until there is more to compile."""
        return self._compilers.count

    def start(self) -> None:
        """Start the measuring process now, rather than at the first request.

        Raises:
            MeasureError: it cannot be started.
        """
        self._alive()

    def begin(self) -> None:
        """Start processes that measure and, where that goes on beside timing, compile; go on while they import torch.

        The first request waits for them. One that cannot be started now is started by a request, which says why.
        """
        with suppress(OSError, DiedError):
            self._begin()
            if self._device.compiles_beside:
                self._compilers.begin()

    def begin_measuring(self) -> None:
        """Start the process that measures alone, as `begin` starts all."""
        with suppress(OSError, DiedError):
            self._begin()

    def _begin(self) -> None:
        if self._child is None:
            self._is_started = False
            self._loaded.clear()
            start = {**self._start, "policy": self._policy, "parent_computes": self._device.is_in_use}
            self._child = Child(start, self._waiting)

    def hear(self, tell: Callable[[str], None]) -> None:
        """Have it told who holds the device, every second while that is waited for, and with "" when that is over."""
        self._told = tell

    def _waiting(self, waited_s: float, words: str) -> None:
        """Count what was waited for the device: processes that wait at the same time count once."""
        now = monotonic()
        self.waited_s += max(0.0, now - max(now - waited_s, self._waited_until))
        self._waited_until = now
        self._told(words)

    def close(self) -> None:
        """Kill the measuring process and those that compile; none has work to save. The next request starts others."""
        if self._child is not None:
            self._child.signal()
        self._compilers.close()
        if self._child is not None:
            self._child.kill()
            self._child = None

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[Result]:
        """Race calls and yield what came of each as soon as it is known; each distinct call of a race once.

        A race's order is the order of its first looks: put what is likely fast first. The measuring process rests while
        the caller handles a result of a race that is over, and the next race is taken then. A call that ends the
        process, or makes it late, is left out of its race and tried once more, alone, after it. After an empty race it
        waits until some call is compiled beside timing.

        Raises:
            MeasureError: the process cannot be started, or is lost repeatedly while it is on no call.
        """
        for race in races:
            if not race:
                checkpoint()
                self._load_ahead()
                self._compilers.turn(MAX_WAIT_S)
            left = {call.key: call for call in race}
            suspects: list[Call] = []
            lost = 0
            while left:
                calls = list(left.values())
                try:
                    for index, measurement in self._attempt(calls):
                        del left[calls[index].key]
                        yield calls[index], measurement
                except DiedError as error:
                    if error.index != NOBODY:
                        suspects.append(left.pop(calls[error.index].key))
                        continue
                    lost += 1
                    if lost == LOST_MAX:
                        raise MeasureError(f"the measuring process was lost {lost} times while idle: {error}") from None
            for call in suspects:
                try:
                    for _, measurement in self._attempt([call]):
                        yield call, measurement
                except DiedError as error:
                    yield call, error.measurement

    def _load_ahead(self) -> None:
        """Have the measuring process, which rests, import what it will need for calls that are being compiled."""
        wanted = {call.candidate.kernel for call in self._compilers.asked} - self._loaded
        if wanted and self._child is not None and self._is_started:
            try:
                self._child.send({"do": "load", "kernels": sorted(wanted)})
            except DiedError:  # the next race starts another
                self._child.kill()
                self._child = None
                return
            self._loaded |= wanted

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
        """Build calls whose kernels compile, on all cores, so that their code is in the cache when they are timed.

        Yields each such call as its compilation ends: with None, or with the measurement that says why it cannot be
        had. Calls of other kernels are skipped. The compiling processes stay for the next calls, and end when a race
        begins `COMPILERS_REST_S` or more after the last of them.
        """
        compiled = [call for call in {c.key: c for c in calls}.values() if KERNELS[call.candidate.kernel].compiles]
        yield from self._compilers.build(compiled)

    @property
    def compiles_beside(self) -> bool:
        """True where calls may be compiled while others are timed."""
        return self._device.compiles_beside

    def compile_beside(self, calls: Sequence[Call]) -> None:
        """Have calls compiled in this order while others are timed, in place of those that wait for it.

        Compiling goes on while a race, or the next one, is waited for. Where no calls are given, it ends.
        """
        if calls:
            self._compilers.ask(calls)
        else:
            self._compilers.close()

    def take_compiled(self) -> Sequence[tuple[Call, Measurement | None]]:
        """Return the calls whose compilation has ended since this was asked: with None, or with why it failed."""
        self._compilers.turn()
        return self._compilers.built()

    def noise_floor(self) -> float:
        """Return the relative difference that two identical calls show when they are raced against each other."""
        return float(self._answer({"do": "noise"})["noise"])

    def ceilings(self, dtypes: Collection[str]) -> Roofline:
        """Return what the device can do at best under this policy; products of matrices of these element types.

        Raises:
            MeasureError: the process cannot be started, or is lost.
        """
        return Roofline.from_facts(self._answer({"do": "ceilings", "dtypes": sorted(dtypes)})["ceilings"])

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the one answer to a request that is not about calls; one that is given up costs the process."""
        self._compilers.rest()
        child = self._alive()
        answer = None
        try:
            child.send({**request, "policy": self._policy})
            answer = child.receive()
        except DiedError as error:
            raise MeasureError(f"the measuring process was lost: {error}") from None
        finally:
            if answer is None:
                child.kill()
                self._child = None
        return answer

    def _attempt(self, calls: Sequence[Call]) -> Iterator[tuple[int, Measurement]]:
        """Run one race and yield results by place; a race that is given up midway costs the process."""
        if self._compilers.idle_s > COMPILERS_REST_S:
            self._compilers.rest()
        child = self._alive()
        over = False
        try:
            asked = {"calls": [call.to_json() for call in calls], "compilers": self._compilers.count + self._beside()}
            child.send({"do": "race", "policy": self._policy, **asked})
            while "done" not in (answer := child.receive(self._compilers)):
                if "warning" in answer:
                    warnings.warn(answer["warning"], stacklevel=stacklevel())
                    continue
                yield answer["index"], Measurement.from_json(answer["measurement"])
            over = True
        finally:
            if not over:
                child.kill()
                self._child = None

    def _alive(self) -> Child:
        self._begin()
        assert self._child is not None
        if not self._is_started:
            child = self._child
            try:
                child.started()
            except BaseException:
                child.kill()
                self._child = None
                raise
            self._is_started = True
        return self._child
