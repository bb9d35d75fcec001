"""The measuring process: reads requests from a pipe, one at a time, until its parent is gone."""

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import signal
import struct
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from math import inf
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

from autotuner.ir.records import Call, Measurement
from autotuner.kernels.registry import KERNELS
from autotuner.measure.devices import device_of
from autotuner.measure.failure import ContextLostError, failure
from autotuner.measure.lock import locked

PULSE = struct.Struct("<qdd")
PR_SET_PDEATHSIG = 1
NOBODY = -1
OWN_WORK_FACTOR = 20.0
LOST_CODE = 71


class Pulse:
    """Progress of the child in memory shared with the parent: its call, since when, and for how long it may.

    The parent looks only when time may be up, so that nothing wakes up beside a kernel that is being timed.
    """

    def __init__(self, file: int) -> None:
        self._memory = mmap(file, PULSE.size)

    def write(self, index: int, allowance_s: float) -> None:
        self._memory[:] = PULSE.pack(index, monotonic(), allowance_s)

    def read(self) -> tuple[int, float, float]:
        """Return the call's place (-1 for none), when work on it began, and seconds that it may take."""
        while True:
            seen = bytes(self._memory)
            if seen == bytes(self._memory):
                index, began, allowance_s = PULSE.unpack(seen)
                return index, began, allowance_s


def load_modules(modules: list[str]) -> None:
    """Import what registers kernels: dotted names, or paths of files, each known by its stem from then on."""
    for module in modules:
        if not module.endswith(".py"):
            importlib.import_module(module)
            continue
        name = Path(module).stem
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(name, module)
        if spec is None or spec.loader is None:
            raise ImportError(f"{module} is no Python file")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


def main(pipe: int, pulse: int, parent: int) -> None:
    """Serve one parent: `pipe` and `pulse` are inherited file descriptors, `parent` its process number."""
    die_with(parent)
    connection = Connection(pipe)
    try:
        serve(connection, Pulse(pulse))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(0)
    except ContextLostError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(LOST_CODE)  # tidying up would wait for the device, or fail at it


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent goes, and offer it first where memory runs out."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return


def serve(connection: Connection, pulse: Pulse) -> None:
    """Answer requests until the pipe closes."""
    start = json.loads(connection.recv_bytes())
    timeout_s = float(start["timeout_s"])
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(start["threads"])
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = start["cache_dir"]
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["TRITON_CACHE_DIR"] = str(Path(start["cache_dir"], "triton"))
    os.environ["CUPY_CACHE_DIR"] = str(Path(start["cache_dir"], "cupy"))
    pin(start["threads"])
    gc.disable()  # while torch is imported, too: a tenth of that
    import torch

    from autotuner.measure.bench import Bench

    torch.set_num_threads(start["threads"])
    torch.set_grad_enabled(False)
    load_modules(start["modules"])
    device = device_of(start["device_type"], start["device_index"])

    def bench_of(policy: Mapping[str, Any]) -> Bench:
        timer = device.timer(device.policy_type(**policy), parent_computes=start["parent_computes"])
        return Bench(timer, device.held_bytes)

    policy = start["policy"]
    bench = bench_of(policy)
    gc.collect()
    gc.freeze()

    def begin(index: int, own_work: bool) -> None:
        pulse.write(index, timeout_s * OWN_WORK_FACTOR if own_work or index == NOBODY else timeout_s)

    def emit(index: int, measurement: Measurement) -> None:
        send(connection, {"index": index, "measurement": measurement.to_json()})

    def waiting(waited_s: float, words: str) -> None:
        send(connection, {"waited_s": waited_s, "words": words})

    send(connection, {"ready": True})
    while True:
        gc.collect()
        pulse.write(NOBODY, inf)
        request = json.loads(connection.recv_bytes())
        if request["do"] == "load":
            begin(NOBODY, True)
            load_builders(request["kernels"])
            continue
        calls = [Call.from_json(value) for value in request.get("calls", ())]
        is_build = request["do"] == "build"
        locking = locked(start["lock"], alone=not is_build, waiting=waiting)
        with nullcontext() if is_build and device.compiles_beside else locking:
            begin(NOBODY, True)
            if request.get("policy", policy) != policy:  # it was begun before the model was known
                policy = request["policy"]
                bench = bench_of(policy)
            if request["do"] == "race":
                if (sentence := bench.contended(request["compilers"])) is not None:
                    send(connection, {"warning": sentence})
                bench.race(calls, begin, emit, contended=sentence is not None)
                send(connection, {"done": True})
            elif request["do"] == "noise":
                send(connection, {"noise": bench.noise_floor()})
            elif request["do"] == "ceilings":
                send(connection, {"ceilings": bench.ceilings(request["dtypes"]).to_facts()})
            else:
                begin(0, False)
                try:
                    bench.build(calls[0])
                except Exception as error:
                    bench.recover(error)
                    emit(0, failure(error))
                send(connection, {"done": True})


def load_builders(kernels: Iterable[str]) -> None:
    """Import what kernels are built by; where that fails, it does so again when one is asked for, and is said then."""
    for name in kernels:
        with suppress(Exception):
            KERNELS[name].builder()


def send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def pin(threads: int) -> None:
    """Stay on as many cores as there are threads: the last ones, since interrupts tend to the first."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])
