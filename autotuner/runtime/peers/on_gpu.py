"""One training step of a configuration against its peers on a device with graphs, each in its strongest forms.

Policy: one process; forward, and backward with every gradient, x included. Before each step all gradients are dropped,
so that each step makes new ones: the same lifetimes for all. Each side also runs as one graph of the whole step,
captured with gradients set to None as torch's documentation says; its name then ends in ", captured". A turn is one
untimed step, then steps that last 20 ms or more between two marks; it is queued whole, and the device is waited for
at its end, so that no side runs ahead while another one is timed. Sides take turns round-robin with a rotating start.
What a side does on the host counts where it is slower than the device, as in a training loop. What steps allocate is
recorded before, from the first on, with what a tuned layer keeps for the next; for a captured one, up to its capture.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from autotuner.errors import first_line
from autotuner.ir.models import Model
from autotuner.measure.devices import device_of
from autotuner.plan.configuration import Configuration
from autotuner.runtime.devices import DeviceRuntime, Run, device_runtime
from autotuner.runtime.fallbacks import warn
from autotuner.runtime.peers.beside_kernels import BesideKernels, slowdown, switching_us
from autotuner.runtime.peers.sides import Layer, StepCall, call_of, layers_of, plan_of
from autotuner.runtime.peers.stacked_layer import BACKENDS, stacked_layer
from autotuner.runtime.peers.training_loop import TrainingLoop, rounds

TURN_US = 20_000.0
BRIEF_US = 4_000.0
CAPTURED = ", captured"
COMPILED = "torch.compile sdpa "
PLAN, GRAPHS = "plan", "plan, own graphs"
OURS = (PLAN, GRAPHS, PLAN + CAPTURED)


class TimedStep:
    """A step that takes turns with others, timed by the device's own clock.

    `when_queued` is called in each turn once all of it is queued, and before the device is waited for.
    """

    def __init__(self, runtime: DeviceRuntime, step: Run, peak_bytes: int | None, kept: Any = None) -> None:
        self._runtime, self._step, self.peak_bytes = runtime, step, peak_bytes
        self._kept = kept  # the memory that a graph reads and writes
        self.when_queued: Callable[[], None] = lambda: None
        self._count = 3
        self.estimate_us = self.turn_us()
        self._count = max(3, round(TURN_US / self.estimate_us))

    def turn_us(self) -> float:
        """Return the mean of a turn's steps, in microseconds, the first left out."""
        self._step()
        began = self._runtime.mark()
        for _ in range(self._count):
            self._step()
        ended = self._runtime.mark()
        self.when_queued()
        self._runtime.synchronize()
        return self._runtime.elapsed_us(began, ended) / self._count

    def brief_us(self) -> float:
        """Return the mean of a few steps, in microseconds, behind as many that are not timed."""
        self._runtime.synchronize()
        count = max(1, round(BRIEF_US / self.estimate_us))
        for _ in range(count):
            self._step()
        began = self._runtime.mark()
        for _ in range(count):
            self._step()
        ended = self._runtime.mark()
        self._runtime.synchronize()
        return self._runtime.elapsed_us(began, ended) / count


def time_on_gpu(
    configuration: Configuration,
    samples: int,
    peers: Mapping[str, TimedStep] | None = None,
    settled_share: float = 0.0,
) -> tuple[dict[str, list[float]], dict[str, int | None], BesideKernels]:
    """Time a configuration's training step and its peers', interleaved.

    Args:
        peers: those of its model, where they are built already.
        settled_share: as for `rounds`.

    Returns:
        Times and peak of each side, and what the plan's step takes beside its kernels.
    """
    if peers is None:
        peers = peers_on_gpu(configuration.model, configuration.device_type)
    sides = own_sides(configuration) | dict(peers)
    times = rounds({name: side.turn_us for name, side in sides.items()}, samples, settled_share)
    peaks = {name: side.peak_bytes for name, side in sides.items()}
    plan = partial(plan_of, configuration, graphs=False)
    return times, peaks, beside_kernels(configuration, plan, sides, times, samples)


def own_sides(configuration: Configuration) -> dict[str, TimedStep]:
    """Return the sides of `OURS`. One that fails is missing, with a warning, but for the plain step."""
    call = partial(call_of, configuration.model, configuration.device_type)
    sides: dict[str, TimedStep] = {}
    add(sides, PLAN, partial(plan_of, configuration, graphs=False), call)
    add(sides, GRAPHS, partial(plan_of, configuration), call, captures=False)
    return sides


def peers_on_gpu(model: Model, device_type: str) -> dict[str, TimedStep]:
    """Return the peers of a model's plans, each with and without ", captured".

    The framework's layer has others with stacked weights and each attention kernel: only the fastest of these is
    compiled. A side that fails is missing, with a warning.
    """
    call = partial(call_of, model, device_type)
    sides: dict[str, TimedStep] = {}
    for name, (when_compiled, layer) in layers_of(model, device_type).items():
        add(sides, name, layer, call)
        for backend in BACKENDS if model.has_framework_layer else ():
            add(sides, f"sdpa {backend}", partial(stacked_layer, model, backend, device=device_type), call)
        best = fastest({each: side.estimate_us for each, side in sides.items()}, "sdpa ")
        if best is None:
            add(sides, when_compiled, partial(compiled, layer), call)
        else:
            add(sides, f"{COMPILED}{best}", compiled_stack(model, best, device_type), call)
    return sides


def add(
    sides: dict[str, TimedStep], name: str, make: Layer, call: Callable[[], StepCall], *, captures: bool = True
) -> None:
    """Add a side, and the same as one graph; where that fails, warn instead, unless it is the plan's own plain step."""
    try:
        loop = TrainingLoop(make(), call())
        found = loop.peak_bytes()
        loop.warm()
        sides[name] = TimedStep(device_runtime(loop.device), loop.step, found)
    except Exception as error:
        if name == PLAN:
            raise
        warn_of_missing(name, error)
        return
    if captures:
        try:
            sides[name + CAPTURED] = captured(loop)
        except Exception as error:
            warn_of_missing(name + CAPTURED, error)


def captured(loop: TrainingLoop, *, anew: bool = True) -> TimedStep:
    """Return the whole step as one graph; gradients are made inside, and lie in the graph's own memory.

    Args:
        anew: whether a tuned layer is given new memory first.
    """
    if anew:
        loop.renew()
    loop.drop()
    runtime, replays = device_runtime(loop.device), list[Run]()

    def warm() -> None:
        loop.warm()
        loop.drop()

    def capture() -> None:
        replays.append(runtime.captured_alone(warm, loop.step))

    device = runtime.device
    found = device_of(device.type, device.index or 0).allocated_bytes(capture)
    written = loop, [leaf.grad for leaf in loop.leaves]
    loop.drop()
    return TimedStep(runtime, replays[0], found, written)


def compiled(make: Layer, mode: str | None = None) -> nn.Module:
    layer: Any = torch.compile(make(), mode=mode, dynamic=False)
    return layer  # type: ignore[no-any-return]


def compiled_stack(model: Model, backend: str, device_type: str, mode: str | None = None) -> Layer:
    """Return what makes a stacked layer with one attention kernel, compiled."""
    return partial(compiled, partial(stacked_layer, model, backend, device=device_type), mode)


def fastest(times_us: Mapping[str, float], beginning: str) -> str | None:
    """Return the attention kernel of the fastest side whose name begins so; None without any."""
    names = [name for name in times_us if name.startswith(beginning)]
    best = min(names, key=times_us.__getitem__, default=None)
    return best and best.removeprefix(beginning).removesuffix(CAPTURED)


def warn_of_missing(name: str, error: Exception) -> None:
    warn(f"{name} is not among the sides: {first_line(error)}")


def beside_kernels(
    configuration: Configuration,
    plan_of_it: Layer,
    sides: Mapping[str, TimedStep],
    times_us: Mapping[str, Sequence[float]],
    samples: int,
) -> BesideKernels:
    """Return what a configuration's captured step takes beside its kernels.

    Args:
        plan_of_it: makes the module that runs it, without graphs of its own.
        sides: those that were timed, and
        times_us: their turns.
    """
    plan = PLAN + CAPTURED
    return BesideKernels(
        overhead_us(configuration, plan_of_it, samples),
        len(configuration.steps) * switching_us(device_runtime(torch.device(configuration.device_type))),
        slowdown(median(times_us[plan]), sides[plan]) if plan in sides else 1.0,
    )


def overhead_us(configuration: Configuration, plan_of_it: Layer, samples: int) -> float:
    """Return what a captured step takes without its kernels: copies of inputs and parameters, what autograd adds."""
    loop = TrainingLoop(plan_of_it(), call_of(configuration.model, configuration.device_type))
    loop.skip_kernels()
    side = captured(loop, anew=False)
    return median(side.turn_us() for _ in range(samples))
