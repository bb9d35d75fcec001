"""Bench actor: the measurers of one GPU, asked in JSON. It knows no database, no HTTP and not Ray."""

import json
import os
import socket
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from time import monotonic
from typing import Any, Protocol

from autotuner.errors import AutotunerError, MeasureError
from autotuner.fleet.roster import Gpu, gpu_to_json
from autotuner.fleet.software import own_software
from autotuner.fleet.spec import MeasurerSpec
from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.measure import Measurer
from autotuner.measure.devices import device_of
from autotuner.plan.configuration import Configuration
from autotuner.server.worker.timing import time_apart
from autotuner.tuner import MeasurerProtocol

IDLE_S = 60.0
CANARY_EVERY_S = 60.0
COMPILERS_REST_S = 20.0
MEASURERS_MAX = 3
"""Measurers that are kept, one per measuring policy in use: each has a process with a context on the GPU."""

SIDE = 4096
_MATRIX = TensorType((SIDE, SIDE), "bfloat16")
CANARY = Call(
    Subgraph((Node("contraction", "ab,bc->ac", (0, 1), (2,)),), (_MATRIX,) * 3, (0, 1), (2,)),
    Candidate("cublas_matmul", ("ab", "ab", "ab")),
)
"""A product of matrices that is timed every minute: GPUs of one class take equally long."""


class ActorMeasurer(MeasurerProtocol, Protocol):
    """A measurer as an actor needs it."""

    @property
    def uuid(self) -> str:
        """The GPU's number, as its driver writes it."""

    @property
    def processes(self) -> int:
        """The number of its processes that have a context on the GPU."""

    def start(self) -> None: ...

    def close(self) -> None: ...


class DeviceMeasurer(Measurer):
    """The measurer of a GPU of this host."""

    def __init__(self, uuid: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.uuid = uuid

    @property
    def processes(self) -> int:
        return self.compilers + (self.process_id is not None)


def on_device(beside: Callable[[], int], *, half_step_bytes: int | None = None, **arguments: Any) -> ActorMeasurer:
    """Return the measurer of this process's first CUDA device: Ray shows each actor its own.

    Args:
        beside: returns the number of this actor's other processes on the GPU.
        half_step_bytes: as `autotuner.measure.devices.half_step_bytes` returns it; None for the policy's own.
        arguments: of `Measurer`.
    """
    device_type = str(arguments.get("device_type", "cpu"))
    device = device_of(device_type)
    rotate_bytes = None if half_step_bytes is None else device.rotate_bytes(half_step_bytes)
    uuid = device.lock_name.removeprefix(f"{device_type}-")
    return DeviceMeasurer(uuid, beside=beside, rotate_bytes=rotate_bytes, **arguments)


class BenchActor:
    """The measurers of one GPU, for every tuning that asks.

    Timing and compiling have a thread each. Each stays for the actor's life: the kernel kills a measuring process when
    the thread that started it ends.

    Args:
        slot: the actor's place in the cluster.
        leave: ends this process; called when nobody has asked for `IDLE_S`, and after a measurer has failed.
    """

    def __init__(self, slot: str, leave: Callable[[], None] = lambda: None, idle_s: float = IDLE_S) -> None:
        self._slot, self._leave, self._idle_s = slot, leave, idle_s
        self._software = own_software()
        self._timing = ThreadPoolExecutor(1, "timing")
        self._compiling = ThreadPoolExecutor(1, "compiling")
        self._measurers: OrderedDict[str, ActorMeasurer] = OrderedDict()
        self._compilers: dict[str, ActorMeasurer] = {}
        self._canary_at = -CANARY_EVERY_S
        self._canary_us: float | None = None
        self._lock = threading.Lock()
        self._busy, self._used_at = 0, monotonic()
        threading.Thread(target=self._watch, name="idle", daemon=True).start()

    def open(self, spec: str) -> str:
        """Start the measurer of a spec, and return what GPU this is; or why it cannot measure."""
        return self._asked(self._timing, lambda: self._opened(spec))

    def look(self, spec: str) -> str:
        """Return type and name of the GPU, and this host's software, without starting a process on it."""
        return self._asked(self._timing, lambda: self._seen(spec))

    def measure(self, spec: str, request: str) -> Iterator[str]:
        """Race calls: say that it has begun, then answer with results, warnings, and seconds waited for the GPU."""
        yield "began"
        yield self._asked(self._timing, lambda: self._measured(spec, json.loads(request)))

    def ask(self, spec: str, request: str) -> str:
        """Answer `{"do": "noise"}`, `{"do": "ceilings"}` or `{"do": "whole"}`: a plan timed end to end."""
        return self._asked(self._timing, lambda: self._told(spec, json.loads(request)))

    def compile(self, spec: str, request: str) -> str:
        """Build calls, and answer with those that fail."""
        return self._asked(self._compiling, lambda: self._compiled(spec, json.loads(request)))

    def close(self) -> None:
        """End all processes."""
        for measurer in (*self._measurers.values(), *self._compilers.values()):
            measurer.close()
        self._measurers.clear()
        self._compilers.clear()

    def _asked(self, thread: ThreadPoolExecutor, work: Callable[[], Mapping[str, Any]]) -> str:
        with self._lock:
            self._busy += 1
        try:
            answer = thread.submit(_answer_of, work).result()
            if "failed" in answer:
                threading.Timer(0.5, self._end).start()  # once the answer has left
            return json.dumps(answer)
        finally:
            with self._lock:
                self._busy -= 1
                self._used_at = monotonic()

    def _opened(self, spec: str) -> Mapping[str, Any]:
        measurer = self._measurer(spec)
        measurer.start()
        self._time_canary(measurer)
        cores = len(os.sched_getaffinity(0))
        host, software = socket.gethostname(), self._software
        gpu = Gpu(self._slot, host, measurer.uuid, measurer.environment, cores, self._canary_us, software)
        return {"gpu": gpu_to_json(gpu), "process": os.getpid()}

    def _seen(self, spec: str) -> Mapping[str, Any]:
        found = self._measurer(spec).environment
        return {"device_type": found.device_type, "device_name": found.device_name, "software": self._software}

    def _measured(self, spec: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        measurer = self._measurer(spec)
        before_s, began = measurer.waited_s, monotonic()
        calls = [Call.from_json(value) for value in request["calls"]]
        results = [[call.key, measured.to_json()] for call, measured in measurer.measure([calls])]
        took_s, waited_s = monotonic() - began, measurer.waited_s - before_s
        self._time_canary(measurer)
        return {"results": results, "took_s": took_s - waited_s, "waited_s": waited_s, "canary_us": self._canary_us}

    def _told(self, spec: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        measurer = self._measurer(spec)
        if request["do"] == "noise":
            return {"noise": measurer.noise_floor()}
        if request["do"] == "ceilings":
            return {"ceilings": measurer.ceilings(request["dtypes"]).to_facts()}
        configuration = Configuration.from_json(request["configuration"])
        return self._alone(lambda: {"configuration": time_apart(configuration, request["samples"]).to_json()})

    def _alone(self, work: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the answer of work that has the GPU to itself.

        It runs on the compiling thread while the timing thread waits: after what that one is compiling for other jobs,
        whose processes then end on the thread that started them.
        """
        while self._measurers:
            self._measurers.popitem()[1].close()

        def answer() -> Mapping[str, Any]:
            while self._compilers:
                self._compilers.popitem()[1].close()
            return work()

        return self._compiling.submit(_answer_of, answer).result()

    def _compiled(self, spec: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if spec not in self._compilers:
            self._compilers[spec] = self._made(spec)
        calls = [Call.from_json(value) for value in request["calls"]]
        found = {call.key: failure for call, failure in self._compilers[spec].prepare(calls)}
        return {"results": [[key, None if m is None else m.to_json()] for key, m in found.items()]}

    def _measurer(self, spec: str) -> ActorMeasurer:
        if spec not in self._measurers:
            while len(self._measurers) >= MEASURERS_MAX:
                self._measurers.popitem(last=False)[1].close()
            self._measurers[spec] = self._made(spec)
        self._measurers.move_to_end(spec)
        return self._measurers[spec]

    def _made(self, spec: str) -> ActorMeasurer:
        wanted = MeasurerSpec.from_text(spec)
        module, _, name = wanted.factory.partition(":")
        made: ActorMeasurer = getattr(import_module(module), name)(self._beside, **wanted.arguments)
        return made

    def _beside(self) -> int:
        """Return the number of processes on the GPU that belong to this actor, less the one that times."""
        measurers = (*self._measurers.values(), *self._compilers.values())
        return max(0, sum(measurer.processes for measurer in measurers) - 1)

    def _time_canary(self, measurer: ActorMeasurer) -> None:
        if monotonic() - self._canary_at < CANARY_EVERY_S:
            return
        self._canary_at = monotonic()
        found = [measured.median_us for _, measured in measurer.measure([[CANARY]])]
        self._canary_us = found[0] if found else None

    def _watch(self) -> None:
        """End compiling processes that rest, and this process when nobody has asked for long."""
        while True:
            threading.Event().wait(min(1.0, self._idle_s / 4))
            with self._lock:
                idle_s = 0.0 if self._busy else monotonic() - self._used_at
            if idle_s > self._idle_s:
                self._end()
                return
            if idle_s > COMPILERS_REST_S and any(measurer.processes for measurer in self._compilers.values()):
                for measurer in self._compilers.values():
                    self._compiling.submit(measurer.close)

    def _end(self) -> None:
        with suppress(Exception):
            self.close()
        self._leave()


def _answer_of(work: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return an answer and its warnings; `failed`: the measurer cannot go on, `refused`: the question is wrong."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer: dict[str, Any] = dict(work())
        except MeasureError as error:
            answer = {"failed": str(error)}
        except AutotunerError as error:
            answer = {"refused": str(error), "error": type(error).__name__}
        except Exception as error:  # such as a driver's that has lost the GPU
            answer = {"failed": f"{type(error).__name__}: {error}"}
    told = [*answer.get("warnings", ()), *(str(warning.message) for warning in caught)]
    return answer | {"warnings": told}
