"""Bytes that training steps move through DRAM, as Nsight Compute counts them.

    python -m scripts.bench.layer_cuda_dram SIDE CONFIGURATION

A side runs in a child process under `ncu`: warmed up, then some training steps, counted kernel by kernel in one pass,
with clocks and caches as they are, so that nothing runs twice. A kernel finds in the second-level cache what the last
ones left there, but no kernels overlap. What it leaves dirty there is written during a later one. Copies and fills that
the driver makes are no kernels, and are not counted.
"""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TUNED, EAGER = "tuned", "eager"
STEPS = 3
LIMIT_S = 240
PLACES = ("opt/nvidia/nsight-compute/*/ncu", "usr/local/cuda*/bin/ncu")
KERNEL, READ, WRITTEN = "Kernel Name", "dram__bytes_read.sum", "dram__bytes_write.sum"
NAMED = re.compile(r"plan step (\d+)/")


class NotCounted(Exception):
    """The profiler did not count; the message says why, in its own words where it has some."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a kernel made DRAM read and write; `step` is the number of the plan's step that it ran for, if any."""

    step: int | None
    read_bytes: float
    written_bytes: float

    @property
    def moved_bytes(self) -> float:
        return self.read_bytes + self.written_bytes


def profiler() -> str | None:
    """Return where `ncu` is: on PATH, or in one of its usual places; None where there is none."""
    elsewhere = (str(file) for place in PLACES for file in sorted(Path("/").glob(place), reverse=True))
    return shutil.which("ncu") or next(elsewhere, None)


def counted(configuration: Path, compiled: str | None) -> dict[str, Any]:
    """Count for a configuration, the framework's layer and a compiled peer.

    Args:
        configuration: the file.
        compiled: the peer's name among the sides; None for none.

    Returns:
        "sides": bytes per training step by side; "steps": bytes by number of the step of the plan; "reason": why
        something is missing, or None.
    """
    found: dict[str, Any] = {"sides": {}, "steps": {}, "reason": None}
    reasons: list[str] = []
    ncu = profiler()
    if ncu is None:
        return found | {"reason": "ncu, Nsight Compute's command line, was not found"}
    for side in (TUNED, EAGER, *([compiled] if compiled else [])):
        try:
            traffic = run_counted(ncu, side, configuration)
        except NotCounted as error:
            reasons.append(f"{side}: {error}")
            if side == TUNED:
                break
            continue
        found["sides"][side] = {
            "read_bytes": sum(kernel.read_bytes for kernel in traffic) / STEPS,
            "written_bytes": sum(kernel.written_bytes for kernel in traffic) / STEPS,
        }
        if side == TUNED:
            found["steps"] = by_step(traffic, STEPS)
    return found | {"reason": "; ".join(reasons) or None}


def by_step(kernels: Iterable[Traffic], count: int) -> dict[int, float]:
    """Return the bytes that each step of the plan moves, by its number, of kernels that ran for `count` of each."""
    found: dict[int, float] = {}
    for kernel in kernels:
        if kernel.step is not None:
            found[kernel.step] = found.get(kernel.step, 0.0) + kernel.moved_bytes / count
    return found


def run_counted(ncu: str, side: str, configuration: Path) -> list[Traffic]:
    """Run a side in a child process under the profiler; return what each kernel of `STEPS` training steps moved.

    Raises:
        NotCounted: the profiler failed, or the side.
    """
    with TemporaryDirectory() as folder:
        log = Path(folder, "log.csv")
        child = [sys.executable, "-m", "scripts.bench.layer_cuda_dram", side, str(configuration.resolve())]
        status, output, errors = ran([*command(ncu, log), *child])
        text = log.read_text() if log.exists() else ""
    failed = complaint("\n".join((text, output, errors)))
    if failed is not None or status != 0:
        said = errors.strip().splitlines() or [f"ncu ended with {status}"]
        raise NotCounted(failed or said[-1])
    return parsed(text)


def ran(arguments: list[str]) -> tuple[int, str, str]:
    """Return status, output and errors of a program; past the limit it is ended, with what it started.

    Raises:
        NotCounted: it took too long, or could not be started.
    """
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no processes that outlive the child
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
    except OSError as error:
        raise NotCounted(f"{arguments[0]} could not be started: {error}") from error
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise NotCounted(f"it took more than {LIMIT_S} s") from error
    return process.returncode, output, errors


def command(ncu: str, log: Path) -> list[str]:
    """Return how the profiler is called, up to the program's own command line."""
    return [
        ncu, "--profile-from-start", "off", "--replay-mode", "kernel", "--clock-control", "none", "--cache-control",
        "none", "--metrics", f"{READ},{WRITTEN}", "--csv", "--page", "raw", "--print-units", "base", "--nvtx",
        "--print-nvtx-rename", "kernel", "--target-processes", "application-only", "--log-file", str(log),
    ]  # fmt: skip


def complaint(text: str) -> str | None:
    """Return the first error in what the profiler printed, None without any."""
    errors = (line.removeprefix("==ERROR==").strip() for line in text.splitlines() if line.startswith("==ERROR=="))
    return next(errors, None)


def parsed(text: str) -> list[Traffic]:
    """Return what each kernel in the profiler's log moved.

    Args:
        text: lines of its own, then CSV: a row of names, a row of units, a row per kernel. A kernel that ran in a range
            is called "RANGE/KERNEL".

    Raises:
        NotCounted: there are no kernels, or their units are not bytes.
    """
    rows = [*csv.reader(line for line in text.splitlines() if line.startswith('"'))]
    if len(rows) < 3 or not {KERNEL, READ, WRITTEN} <= {*rows[0]}:
        raise NotCounted("the profiler's log has no kernels")
    names, units, *kernels = rows
    name, read, written = (names.index(column) for column in (KERNEL, READ, WRITTEN))
    if units[read] != "byte" or units[written] != "byte":
        raise NotCounted(f"the profiler counted in {units[read]} and {units[written]}, not in byte")
    found = []
    for row in kernels:
        ran_for = NAMED.match(row[name])
        moved = (float(row[column].replace(",", "")) for column in (read, written))
        found.append(Traffic(int(ran_for[1]) if ran_for else None, *moved))
    return found


def main() -> None:
    """Run a side; the profiler counts from `start` to `stop`."""
    import torch

    from autotuner.plan.configuration import load_configuration
    from autotuner.runtime.framework import MadeUpCall
    from autotuner.runtime.peers.training_loop import TrainingLoop

    side, file = sys.argv[1:]
    found = load_configuration(Path(file))
    if side == TUNED:
        name_steps()
    loop = TrainingLoop(layer_of(side, found), MadeUpCall.of(found.model, device="cuda"))
    torch.autograd.set_multithreading_enabled(False)  # a range's name is known in its own thread
    loop.warm()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    for _ in range(STEPS):
        loop.step()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def name_steps() -> None:
    """Have each step of the plan run in a range of its name, in workspaces that are made from now on."""
    import torch

    from autotuner.runtime.workspace import Workspace

    built = Workspace._built

    def named(workspace: Any, number: int, views: Any) -> Any:
        call = built(workspace, number, views)

        def run() -> None:
            with torch.cuda.nvtx.range(f"plan step {number}"):
                call()

        return run

    Workspace._built = named  # type: ignore[assignment, method-assign]


def layer_of(side: str, found: Any) -> Any:
    """Return the layer of a side by its name, "torch.compile" of it where the name begins so."""
    import torch

    from autotuner.runtime.drop_in import apply
    from autotuner.runtime.framework import encoder_layer
    from autotuner.runtime.peers.stacked_layer import stacked_layer

    kind = side.removeprefix("torch.compile").strip()
    if kind.startswith("sdpa "):
        layer: Any = stacked_layer(found.model, kind.removeprefix("sdpa "))
    else:
        layer = encoder_layer(found.model, device="cuda")
    if side == TUNED:
        return apply(layer, found, graphs=False)
    return torch.compile(layer, dynamic=False) if side.startswith("torch.compile") else layer


if __name__ == "__main__":
    main()
