"""One training step of a configuration against its peers on CUDA, each in its strongest forms.

Policy: one process; forward, and backward with every gradient, x included. Before each step all gradients are dropped,
so that each step makes new ones: the same lifetimes for all. Each side also runs as one CUDA graph of the whole step,
captured with gradients set to None as torch's documentation says; its name then ends in ", captured". A turn is one
untimed step, then steps that last 20 ms or more between two events; it is queued whole, and the device is waited for
at its end, so that no side runs ahead while another one is timed. Sides take turns round-robin with a rotating start.
What a side does on the host counts where it is slower than the device, as in a training loop. The clock of the
multiprocessors is read in each turn once all is queued: under load that lasts, a device at its power limit lowers it,
and steps take longer than the sum of kernels that were timed in short rounds at full clock. What steps allocate is
recorded before, from the first on, with what a tuned layer keeps for the next; for a captured one, up to its capture.
Sides of JAX's join where it is installed and all peers are asked for; see `jax_side`. A side that computes less than
the model asks for is timed, and is nobody's peer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any, Protocol

import torch
from torch import nn

from autotuner.ir.models import Model
from autotuner.measure.allocations import allocated_on_cuda_bytes
from autotuner.measure.device import Management, cuda_uuid
from autotuner.plan.configuration import Configuration, Measured
from autotuner.runtime.framework import MadeUpCall, encoder_layer
from autotuner.runtime.function import workspace_of
from autotuner.runtime.module import TunedModule, apply
from autotuner.runtime.peak import peak_bytes
from autotuner.runtime.peers.jax_layer import is_installed
from autotuner.runtime.peers.jax_side import JaxSide, jax_names
from autotuner.runtime.peers.stacked_layer import BACKENDS, stacked_layer
from autotuner.runtime.tally import warn

TURN_US = 20_000.0
WARM_STEPS = 4
TRIAL_TURNS = 5
CAPTURED = ", captured"
COMPILED = "torch.compile sdpa "
PLAN, GRAPHS = "plan", "plan, own graphs"
OURS = (PLAN, GRAPHS, PLAN + CAPTURED)

Step = Callable[[], None]
Layer = Callable[[], nn.Module]


@dataclass(frozen=True)
class Timing:
    """What a side takes per step, and allocates at most beside parameters and inputs; None where that is not known.

    `sm_clock_mhz` is the median of the clocks of its turns.
    """

    median_us: float
    least_us: float
    peak_bytes: int | None
    computes_less: bool = False
    sm_clock_mhz: float | None = None


class Timed(Protocol):
    """What takes turns: a side of torch's or of JAX's."""

    peak_bytes: int | None
    estimate_us: float
    computes_less: bool
    clocks_mhz: list[int]

    def turn_us(self) -> float: ...


class Side:
    """A step that is timed."""

    computes_less = False

    def __init__(self, step: Step, peak_bytes: int | None) -> None:
        self._step, self.peak_bytes = step, peak_bytes
        self.clocks_mhz: list[int] = []
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._count = 3
        self.estimate_us = self.turn_us()
        self._count = max(3, round(TURN_US / self.estimate_us))

    def turn_us(self) -> float:
        """Return the mean of a turn's steps, in microseconds, the first left out."""
        start, end = self._events
        self._step()
        start.record()
        for _ in range(self._count):
            self._step()
        end.record()
        self.clocks_mhz += sm_clock_mhz()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self._count


class TrainingLoop:
    """One layer and its call, step by step or as one graph."""

    def __init__(self, layer: nn.Module, call: MadeUpCall) -> None:
        self._layer, self._call = layer, call
        self._leaves = [call.x, *layer.parameters()]
        self._kept: list[Any] = []

    def step(self) -> None:
        for leaf in self._leaves:
            leaf.grad = None
        self._layer(self._call.x, **self._call.masks).backward(self._call.grad_y)

    def warm(self) -> None:
        for _ in range(WARM_STEPS):
            self.step()

    def drop(self) -> None:
        for leaf in self._leaves:
            leaf.grad = None

    def plain(self) -> Side:
        found = peak_bytes(self._layer, self._call)
        self.warm()
        return Side(self.step, found)

    def captured(self, *, anew: bool = True) -> Side:
        """Return the whole step as one graph; gradients are made inside, and lie in the graph's own memory.

        Args:
            anew: whether a tuned layer is given new memory first.
        """
        if anew and isinstance(self._layer, TunedModule):
            self._layer.bind()
        self.drop()
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]

        def capture() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.warm()
            torch.cuda.current_stream().wait_stream(side)
            self.drop()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                self.step()

        found = allocated_on_cuda_bytes(capture)
        self._kept.append([leaf.grad for leaf in self._leaves])
        self.drop()
        return Side(graph.replay, found)

    def overhead_us(self, samples: int) -> float:
        """Return what a tuned layer's captured step takes with its kernels left out: copies in, what autograd adds."""
        workspace = workspace_of(self._layer(self._call.x, **self._call.masks))
        workspace.skips_kernels = True
        side = self.captured(anew=False)
        return median(side.turn_us() for _ in range(samples))


def time_on_cuda(
    configuration: Configuration, samples: int = 50, *, all_peers: bool = False, max_autotune: bool = False
) -> dict[str, Timing]:
    """Time a configuration's step and its peers', interleaved.

    Args:
        configuration: what to run.
        samples: turns timed of each.
        all_peers: also compile the framework's layer, and the stacked layer with each attention kernel, else only with
            the fastest; also JAX's layer, where JAX is installed.
        max_autotune: also compile the one that is the fastest compiled in a few turns with max-autotune; takes minutes.

    Returns:
        By side: `OURS`, then peers, each with and without ", captured". A side that fails is missing, with a warning.

    Raises:
        ConfigurationError: the framework has no layer for the configuration's model.
    """
    model = configuration.model
    call = partial(MadeUpCall.of, model, device="cuda")
    layer = partial(encoder_layer, model, device="cuda")
    sides: dict[str, Timed] = {}
    add(sides, PLAN, lambda: apply(layer(), configuration, graphs=False), call)
    add(sides, GRAPHS, lambda: apply(layer(), configuration), call, captures=False)
    add(sides, "eager", layer, call)
    for backend in BACKENDS:
        add(sides, f"sdpa {backend}", partial(stacked_layer, model, backend), call)
    for name, made in compiled(model, sides, all_peers).items():
        add(sides, name, made, call)
    if max_autotune:
        turns = {name: side.turn_us for name, side in sides.items() if name.startswith(COMPILED)}
        best = fastest({name: median(us) for name, us in rounds(turns, TRIAL_TURNS).items()}, COMPILED)
        if best is not None:
            mode = "max-autotune-no-cudagraphs"
            add(sides, f"max-autotune sdpa {best}", partial(_compiled, partial(stacked_layer, model, best), mode), call)
    if all_peers:
        add_jax(sides, model)
    times = rounds({name: side.turn_us for name, side in sides.items()}, samples)
    return {name: timing(sides[name], us) for name, us in times.items()}


def timing(side: Timed, times_us: Sequence[float]) -> Timing:
    """Return what turns say of a side: its clock, of as many turns as were timed."""
    clocks = side.clocks_mhz[-len(times_us) :]
    return Timing(
        median(times_us), min(times_us), side.peak_bytes, side.computes_less, median(clocks) if clocks else None
    )


def sm_clock_mhz() -> list[int]:
    """Return the reading of the current device's clock; none where the driver does not say."""
    found = management().sm_clock_mhz(cuda_uuid(torch.cuda.current_device()))
    return [] if found is None else [found]


@cache
def management() -> Management:
    return Management()


def add(
    sides: dict[str, Timed], name: str, make: Layer, call: Callable[[], MadeUpCall], *, captures: bool = True
) -> None:
    """Add a side, and the same as one graph; where that fails, warn instead, unless it is the plan's own plain step."""
    try:
        loop = TrainingLoop(make(), call())
        sides[name] = loop.plain()
    except Exception as error:
        if name == PLAN:
            raise
        _left_out(name, error)
        return
    if captures:
        try:
            sides[name + CAPTURED] = loop.captured()
        except Exception as error:
            _left_out(name + CAPTURED, error)


def add_jax(sides: dict[str, Timed], model: Model, platform: str = "cuda") -> None:
    """Add the sides of JAX's where it is installed; where they do not run, warn instead."""
    if not is_installed():
        return
    for name in jax_names(model):
        try:
            sides[name] = JaxSide(name, model, TURN_US, platform)
        except Exception as error:
            _left_out(name, error)


def compiled(model: Model, sides: Mapping[str, Timed], all_peers: bool) -> dict[str, Layer]:
    """Return which layers are compiled, by name: of the stacked ones, those whose attention kernel runs here."""
    best = fastest({name: side.estimate_us for name, side in sides.items()}, "sdpa ")
    chosen = [backend for backend in BACKENDS if f"sdpa {backend}" in sides and (all_peers or backend == best)]
    found: dict[str, Layer] = {
        f"{COMPILED}{name}": partial(_compiled, partial(stacked_layer, model, name), None) for name in chosen
    }
    if all_peers or not found:
        found["torch.compile"] = partial(_compiled, partial(encoder_layer, model, device="cuda"), None)
    return found


def fastest(times_us: Mapping[str, float], beginning: str) -> str | None:
    """Return the attention kernel of the fastest side whose name begins so; None without any."""
    names = [name for name in times_us if name.startswith(beginning)]
    best = min(names, key=times_us.__getitem__, default=None)
    return best and best.removeprefix(beginning).removesuffix(CAPTURED)


def _compiled(make: Layer, mode: str | None) -> nn.Module:
    layer: Any = torch.compile(make(), mode=mode, dynamic=False)
    return layer  # type: ignore[no-any-return]


def _left_out(name: str, error: Exception) -> None:
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    warn(f"{name} is not among the sides: {words}")


def rounds(turns: Mapping[str, Callable[[], float]], samples: int) -> dict[str, list[float]]:
    """Take a turn of each once per round; every round starts with the next one."""
    names = list(turns)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(samples):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(turns[name]())
    return times


def overhead_us(configuration: Configuration, samples: int) -> float:
    """Return what a configuration's step takes on the device beside its kernels, in microseconds."""
    layer = apply(encoder_layer(configuration.model, device="cuda"), configuration, graphs=False)
    return TrainingLoop(layer, MadeUpCall.of(configuration.model, device="cuda")).overhead_us(samples)


def as_measured(timings: Mapping[str, Timing], samples: int, overhead: float) -> Measured:
    """Return timings as a configuration keeps them: of the plan's forms the fastest stands for it.

    Peers are the sides that compute what the model asks for.
    """
    ours = min((timings[name] for name in OURS if name in timings), key=lambda timing: timing.median_us)
    peers = {name: timing for name, timing in timings.items() if name not in OURS and not timing.computes_less}
    return Measured(
        ours.median_us,
        overhead,
        {name: timing.median_us for name, timing in peers.items()},
        samples,
        ours.peak_bytes,
        {name: timing.peak_bytes for name, timing in peers.items()},
    )
