"""A configuration's training step on CUDA against every peer: more compiled forms than tuning times, and JAX's layer.

A first look of a few turns decides which attention kernels are compiled, and which sides are timed at length. The
clock of the multiprocessors is read in each turn once all is queued: under load that lasts, a device at its power limit
lowers it, and steps take longer than the sum of kernels that were timed in short rounds at full clock. Sides of JAX's
join where it is installed. A side that computes less than the model asks for is timed, and is nobody's peer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch
from torch import nn

from autotuner.ir.device import CUDA
from autotuner.ir.models import Model
from autotuner.measure.devices.nvml import Nvml, cuda_uuid
from autotuner.plan.configuration import Configuration
from autotuner.plan.parts import Measured
from autotuner.runtime import apply
from autotuner.runtime.framework import MadeUpCall
from autotuner.runtime.peers import as_measured
from autotuner.runtime.peers.on_gpu import (
    CAPTURED,
    COMPILED,
    GRAPHS,
    OURS,
    PLAN,
    TURN_US,
    TimedStep,
    add,
    beside_kernels,
    warn_of_missing,
)
from autotuner.runtime.peers.stacked_layer import BACKENDS, stacked_layer
from autotuner.runtime.peers.training_loop import rounds
from scripts.bench.cases import Make
from scripts.bench.jax_layer import WITHOUT_DROPOUT, JaxSide, is_installed, jax_names
from scripts.pages import Stages

LOOK_TURNS = 5
LEFT_OUT = 1.15
"""How much slower than the fastest peer a side is in the first look that is timed no further."""
EAGER, SDPA, COMPILED_LAYER = "eager", "sdpa ", "torch.compile"
MAX_AUTOTUNED = {"aten": "max-autotune, products of ATen, sdpa ", "all": "max-autotune sdpa ", "none": ""}
"""How sides begin that max-autotune compiles, by what it may choose products from."""


class TakesTurns(Protocol):
    """A side of torch's or of JAX's."""

    peak_bytes: int | None

    def turn_us(self) -> float: ...


@dataclass(frozen=True)
class SideTiming:
    """A side's time per step, and the most that it allocates beside parameters and inputs; None where not known.

    `sm_clock_mhz` is the median of the clocks of its turns.
    """

    median_us: float
    least_us: float
    peak_bytes: int | None
    computes_less: bool = False
    sm_clock_mhz: float | None = None


@dataclass(frozen=True)
class AllTimings:
    """Timings by side: `OURS`, then peers, each with and without ", captured".

    `left_out_us` are those sides that a first look found too slow to be timed at length, with its medians; `measured`
    is what a configuration keeps.
    """

    by_side: Mapping[str, SideTiming]
    left_out_us: Mapping[str, float]
    measured: Measured


def time_all_peers(
    make: Make,
    configuration: Configuration,
    samples: int,
    *,
    max_autotune: str = "aten",
    jax: bool = True,
    stages: Stages,
) -> AllTimings:
    """Time a configuration's step and its peers', interleaved; a side that fails is missing, with a warning.

    Args:
        make: of the framework's layer.
        configuration: what to run.
        samples: turns timed of each.
        max_autotune: a key of `MAX_AUTOTUNED`. The layer with the fastest attention kernel is compiled with it; with
            "all", products are written and timed as well, which takes minutes.
        jax: whether sides of JAX's join.
        stages: told how long it takes to make the sides, and to time them.
    """
    model = configuration.model
    torch.compiler.reset()
    of_torch = sides_of(make, configuration, max_autotune, stages)
    clocks_mhz: dict[str, list[int]] = {name: [] for name in of_torch}
    management, uuid = Nvml(), cuda_uuid(torch.cuda.current_device())

    def read_clock(name: str) -> None:
        found = management.sm_clock_mhz(uuid)
        clocks_mhz[name] += [] if found is None else [found]

    sides: dict[str, TakesTurns] = {**of_torch}
    if jax:
        with stages("JAX"):
            add_jax(sides, model)
    with stages("turns"):
        slow_us = too_slow(looked_at(sides))
        for name in slow_us:
            del sides[name]
        for name in of_torch.keys() & sides.keys():
            of_torch[name].when_queued = partial(read_clock, name)
        times_us = rounds({name: side.turn_us for name, side in sides.items()}, samples)
    timings = {
        name: timing(name, us, sides[name].peak_bytes, clocks_mhz.get(name, ())) for name, us in times_us.items()
    }
    peers_us = {name: us for name, us in times_us.items() if not timings[name].computes_less}
    peaks = {name: side.peak_bytes for name, side in sides.items()}
    with stages("overhead"):
        layer = make(configuration.model, device=CUDA)
        beside = beside_kernels(
            configuration, lambda: apply(layer, configuration, graphs=False), of_torch, times_us, samples
        )
    return AllTimings(timings, slow_us, as_measured(peers_us, peaks, beside))


def sides_of(make: Make, configuration: Configuration, max_autotune: str, stages: Stages) -> dict[str, TimedStep]:
    """Return the plan, and all peers of torch's that are worth compiling."""
    model = configuration.model
    call, layer = partial(MadeUpCall.of, model, device=CUDA), partial(make, model, device=CUDA)
    sides: dict[str, TimedStep] = {}
    with stages("plan"):
        add(sides, PLAN, lambda: apply(layer(), configuration, graphs=False), call)
        add(sides, GRAPHS, lambda: apply(layer(), configuration), call, captures=False)
    with stages(EAGER):
        add(sides, EAGER, layer, call)
        for backend in BACKENDS:
            add(sides, f"{SDPA}{backend}", partial(stacked_layer, model, backend, device=CUDA), call)
        worth = fast_kernels(looked_at(sides), SDPA)
    for backend in worth:
        with stages(f"{COMPILED}{backend}"):
            add(sides, f"{COMPILED}{backend}", partial(compiled_side, f"{COMPILED}{backend}", make, model), call)
    with stages(COMPILED_LAYER):
        add(sides, COMPILED_LAYER, partial(compiled_side, COMPILED_LAYER, make, model), call)
    begin = MAX_AUTOTUNED[max_autotune]
    for backend in fast_kernels(looked_at(sides), COMPILED)[:1] if begin else ():
        name = f"{begin}{backend}"
        with stages(name):
            add(sides, name, partial(compiled_side, name, make, model), call)
    return sides


def compiled_side(name: str, make: Make, model: Model) -> nn.Module:
    """Return the compiled layer of a side by its name."""
    begin, _, backend = name.partition(SDPA)
    made = stacked_layer(model, backend, device=CUDA) if backend else make(model, device=CUDA)
    options = _inductor_options(begin) if begin.startswith("max-autotune") else None
    layer: nn.Module = torch.compile(made, options=options, dynamic=False)  # type: ignore[assignment]
    return layer


def _inductor_options(name: str) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    found: dict[str, Any] = list_mode_options("max-autotune-no-cudagraphs", dynamic=False)
    return found | ({"max_autotune_gemm_backends": "ATEN"} if "ATen" in name else {})


def looked_at(sides: Mapping[str, TakesTurns]) -> dict[str, float]:
    """Return medians of a few turns."""
    times_us = rounds({name: side.turn_us for name, side in sides.items()}, LOOK_TURNS)
    return {name: median(us) for name, us in times_us.items()}


def fast_kernels(times_us: Mapping[str, float], beginning: str) -> list[str]:
    """Return the attention kernels of sides whose names begin so, the fastest first, without those much slower.

    A kernel is as fast as its faster form, captured or not.
    """
    best_us: dict[str, float] = {}
    for name, us in sorted(times_us.items(), key=lambda item: item[1]):
        if name.startswith(beginning):
            best_us.setdefault(name.removeprefix(beginning).removesuffix(CAPTURED), us)
    return [kernel for kernel, us in best_us.items() if us <= LEFT_OUT * min(best_us.values())]


def too_slow(times_us: Mapping[str, float]) -> dict[str, float]:
    """Return the sides to time no further: peers much slower than the fastest. Eager stays, as a scale."""
    best = min((us for name, us in times_us.items() if name not in (*OURS, WITHOUT_DROPOUT)), default=0.0)
    kept = {*OURS, EAGER, EAGER + CAPTURED}
    return {name: us for name, us in times_us.items() if us > LEFT_OUT * best and name not in kept}


def add_jax(sides: dict[str, TakesTurns], model: Model, platform: str = CUDA) -> None:
    """Add the sides of JAX's where it is installed; where they do not run, warn instead."""
    if not is_installed():
        return
    for name in jax_names(model):
        try:
            sides[name] = JaxSide(name, model, TURN_US, platform)
        except Exception as error:
            warn_of_missing(name, error)


def timing(name: str, times_us: Sequence[float], peak_bytes: int | None, clocks_mhz: Sequence[int]) -> SideTiming:
    return SideTiming(
        median(times_us),
        min(times_us),
        peak_bytes,
        name == WITHOUT_DROPOUT,
        median(clocks_mhz) if clocks_mhz else None,
    )
