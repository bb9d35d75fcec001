"""A configuration's training step on CUDA against every peer: more compiled forms than tuning times, and JAX's layer.

The clock of the multiprocessors is read in each turn once all is queued: under load that lasts, a device at its power
limit lowers it, and steps take longer than the sum of kernels that were timed in short rounds at full clock. Sides of
JAX's join where it is installed. A side that computes less than the model asks for is timed, and is nobody's peer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Protocol

import torch

from autotuner.ir.models import Model
from autotuner.measure.devices.nvml import Nvml, cuda_uuid
from autotuner.plan.configuration import Configuration, Measured
from autotuner.runtime.framework import MadeUpCall, encoder_layer
from autotuner.runtime.peers import as_measured
from autotuner.runtime.peers.on_cuda import (
    COMPILED,
    TURN_US,
    TimedStep,
    add,
    compiled,
    compiled_stack,
    fastest,
    overhead_us,
    sides_on_cuda,
    warn_of_missing,
)
from autotuner.runtime.peers.stacked_layer import BACKENDS
from autotuner.runtime.peers.training_loop import rounds
from scripts.bench.jax_layer import WITHOUT_DROPOUT, JaxSide, is_installed, jax_names

TRIAL_TURNS = 5
MAX_AUTOTUNE = "max-autotune-no-cudagraphs"


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


def time_all_peers(
    configuration: Configuration, samples: int, *, max_autotune: bool = False
) -> tuple[dict[str, SideTiming], Measured]:
    """Time a configuration's step and its peers', interleaved.

    Args:
        configuration: what to run.
        samples: turns timed of each.
        max_autotune: also compile the one that is the fastest compiled in a few turns with max-autotune; takes minutes.

    Returns:
        By side: `OURS`, then peers, each with and without ", captured", and what a configuration keeps of it. A side
        that fails is missing, with a warning.

    Raises:
        ConfigurationError: the framework has no layer for the configuration's model.
    """
    model = configuration.model
    of_torch = sides_on_cuda(configuration)
    add_compiled(of_torch, model, max_autotune)
    clocks_mhz: dict[str, list[int]] = {name: [] for name in of_torch}
    management, uuid = Nvml(), cuda_uuid(torch.cuda.current_device())

    def read_clock(name: str) -> None:
        found = management.sm_clock_mhz(uuid)
        clocks_mhz[name] += [] if found is None else [found]

    for name, side in of_torch.items():
        side.when_queued = partial(read_clock, name)
    sides: dict[str, TakesTurns] = {**of_torch}
    add_jax(sides, model)
    times_us = rounds({name: side.turn_us for name, side in sides.items()}, samples)
    timings = {
        name: timing(name, us, sides[name].peak_bytes, clocks_mhz.get(name, ())) for name, us in times_us.items()
    }
    peers_us = {name: us for name, us in times_us.items() if not timings[name].computes_less}
    peaks = {name: side.peak_bytes for name, side in sides.items()}
    return timings, as_measured(peers_us, peaks, overhead_us(configuration, samples))


def add_compiled(sides: dict[str, TimedStep], model: Model, max_autotune: bool) -> None:
    """Compile the framework's layer, and the stacked one with each attention kernel that runs here."""
    call = partial(MadeUpCall.of, model, device="cuda")
    for backend in BACKENDS:
        if f"sdpa {backend}" in sides and f"{COMPILED}{backend}" not in sides:
            add(sides, f"{COMPILED}{backend}", compiled_stack(model, backend), call)
    if "torch.compile" not in sides:
        add(sides, "torch.compile", partial(compiled, partial(encoder_layer, model, device="cuda")), call)
    if max_autotune:
        turns = {name: side.turn_us for name, side in sides.items() if name.startswith(COMPILED)}
        best = fastest({name: median(us) for name, us in rounds(turns, TRIAL_TURNS).items()}, COMPILED)
        if best is not None:
            add(sides, f"max-autotune sdpa {best}", compiled_stack(model, best, MAX_AUTOTUNE), call)


def add_jax(sides: dict[str, TakesTurns], model: Model, platform: str = "cuda") -> None:
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
