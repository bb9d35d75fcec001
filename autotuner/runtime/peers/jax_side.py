"""JAX's training steps as sides that take turns with torch's; where JAX is not installed there are none.

JAX queues on a stream of its own, which events of torch's do not see: a turn is timed by the host's clock, from a
device that is idle to one that is idle again. Like all sides, it drops its results before each step. Each step gets the
key that the last one returned, so that each draws new numbers.
"""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch

from autotuner.ir.models import Model
from autotuner.runtime.framework import MadeUpCall
from autotuner.runtime.peers.jax_layer import arguments, imported, training_step

PLAIN, CUDNN, WITHOUT_DROPOUT = "jax", "jax cudnn", "jax cudnn, no dropout of weights"
ATTENTION = {PLAIN: "plain", CUDNN: "cudnn", WITHOUT_DROPOUT: "cudnn"}
WARM_STEPS = 4


def jax_names(model: Model) -> tuple[str, ...]:
    """Return the sides that JAX has for a model: with cuDNN's attention, one that says so where it drops no weights."""
    return (PLAIN, WITHOUT_DROPOUT if float(model.options["attention_dropout"]) else CUDNN)


class JaxSide:
    """A compiled training step, warmed up.

    `peak_bytes` is what XLA's plan of the step's memory has beside its arguments: results and temporaries.
    `computes_less` says whether it leaves out what the model asks for. `clocks_mhz` stays empty: no clock is read.
    """

    def __init__(self, name: str, model: Model, turn_us: float, platform: str = "cuda") -> None:
        """Compile and warm up.

        Args:
            name: one of `jax_names(model)`.
            turn_us: how long a turn lasts.
            platform: of the device, as JAX names it.

        Raises:
            ConfigurationError: the layer in JAX is not for this model.
            Exception: whatever JAX says where it does not run.
        """
        jax = imported()
        self._wait: Callable[[], None] = torch.cuda.synchronize if platform == "cuda" else lambda: None
        self._block = jax.block_until_ready
        step: Any = jax.jit(training_step(model, ATTENTION[name]))
        *self._leaves, self._key = arguments(model, MadeUpCall.of(model), platform)
        self._step = step.lower(*self._leaves, self._key).compile()
        stats = self._step.memory_analysis()
        self.peak_bytes: int | None = None if stats is None else stats.temp_size_in_bytes + stats.output_size_in_bytes
        self.computes_less = name == WITHOUT_DROPOUT
        self.clocks_mhz: list[int] = []
        self._results: Any = None
        self._count = WARM_STEPS
        self.turn_us()
        self.estimate_us = self.turn_us()
        self._count = max(3, round(turn_us / self.estimate_us))

    def step(self) -> None:
        self._results = None
        *self._results, self._key = self._step(*self._leaves, self._key)

    def turn_us(self) -> float:
        """Return the mean of a turn's steps, in microseconds, the first left out."""
        self.step()
        self._block((self._results, self._key))
        self._wait()
        began = perf_counter_ns()
        for _ in range(self._count):
            self.step()
        self._block((self._results, self._key))
        self._wait()
        return (perf_counter_ns() - began) / 1e3 / self._count
