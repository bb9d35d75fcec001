"""The post-norm encoder layer in plain JAX, written for speed, and its training step as a side that takes turns.

One product for query, key and value; softmax and layer norm with float32 statistics; dropout at all sites, from bits of
XLA's own generator ("rbg"). Attention is written out, or cuDNN's by `jax.nn.dot_product_attention`, which has no
dropout of weights in JAX's public interface.

JAX queues on a stream of its own, which events of torch's do not see: a turn is timed by the host's clock, from a
device that is idle to one that is idle again. Like all sides, it drops its results before each step. Each step gets the
key that the last one returned, so that each draws new numbers.
"""

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from autotuner.errors import ConfigurationError
from autotuner.ir.models import Model
from autotuner.runtime.framework import MadeUpCall, encoder_layer

Array = Any  # a jax.Array; JAX is not imported before it is needed
Parameters = dict[str, Array]
TrainingStep = Callable[[Parameters, Array, Array, Array], tuple[Array, Array, Parameters, Array]]

PLAIN, CUDNN, WITHOUT_DROPOUT = "jax", "jax cudnn", "jax cudnn, no dropout of weights"
ATTENTION = {PLAIN: "plain", CUDNN: "cudnn", WITHOUT_DROPOUT: "cudnn"}
WARM_STEPS = 4
KEPT_BITS = 16  # what decides whether an element is kept: p is met to 2**-17
NAMES = (
    "self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight", "self_attn.out_proj.bias",
    "linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias",
    "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias",
)  # fmt: skip


def is_installed() -> bool:
    return find_spec("jax") is not None


def imported() -> Any:
    """Import JAX so that it leaves the device's memory to the other sides, unless the user's environment says more."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax


def training_step(model: Model, attention: str = "plain") -> TrainingStep:
    """Return step(parameters, x, grad_y, key) -> (y, grad_x, gradients of parameters, the next step's key).

    Args:
        model: a bert-encoder without an attention mask, in bfloat16, float16 or float32.
        attention: "plain", or "cudnn", without dropout of weights.

    Raises:
        ConfigurationError: the model has an attention mask, or is in float64, which JAX would narrow to float32.
    """
    if model.name != "bert-encoder":
        raise ConfigurationError(f"the layer in JAX is a bert-encoder, not a {model.name}")
    if model.options["attention_mask"]:
        raise ConfigurationError("the layer in JAX takes no attention mask: give a model whose attention_mask is false")
    if model.dtype == "float64":
        raise ConfigurationError("the layer in JAX is not for float64: give bfloat16, float16 or float32")
    jax = imported()

    def step(parameters: Parameters, x: Array, grad_y: Array, key: Array) -> tuple[Array, Array, Parameters, Array]:
        following, *keys = jax.random.split(key, 5)
        # Float32 products in TF32, which is XLA's default on a GPU and not torch's, would be another computation.
        precise = jax.default_matmul_precision("float32" if model.dtype == "float32" else None)
        with precise:
            y, pull = jax.vjp(partial(_forward, jax, model, attention, keys), parameters, x)
            grads, grad_x = pull(grad_y)
        return y, grad_x, grads, following

    return step


def arguments(model: Model, call: MadeUpCall, platform: str) -> tuple[Parameters, Array, Array, Array]:
    """Return a training step's arguments on a device: values of `encoder_layer(model)` and of a call, and a first key.

    Args:
        platform: of the device, as JAX names it: "cpu" or "cuda".

    Raises:
        ConfigurationError: the framework has no layer for this model.
        RuntimeError: JAX has no such device.
    """
    jax = imported()
    device = jax.devices(platform)[0]
    put = partial(_put, jax, device)
    parameters = {name: put(tensor) for name, tensor in encoder_layer(model).named_parameters()}
    return parameters, put(call.x), put(call.grad_y), jax.device_put(jax.random.key(0, impl="rbg"), device)


def _put(jax: Any, device: Any, tensor: Tensor) -> Array:
    """Return a tensor's values on a device; NumPy has no bfloat16, and float32 holds all of its values."""
    values = tensor.detach().cpu().to(torch.float32).numpy()
    return jax.device_put(values.astype(jax.numpy.dtype(str(tensor.dtype).removeprefix("torch."))), device)


def _forward(jax: Any, model: Model, attention: str, keys: list[Array], parameters: Parameters, x: Array) -> Array:
    """Return y of x, both (b, l, h)."""
    options, extents = model.options, model.extents
    to_stacked, to_stacked_bias, to_joined, to_joined_bias, widen, widen_bias, narrow, narrow_bias, *norms = (
        parameters[name] for name in NAMES
    )
    norm = partial(_layer_norm, jax, float(options["epsilon"]))
    dropped, product = partial(_dropped, jax), partial(_product, jax)
    batch, length, hidden = x.shape

    stacked = product(x, to_stacked, to_stacked_bias).reshape(batch, length, 3, extents["n"], extents["p"])
    query, key, value = (stacked[:, :, i] for i in range(3))
    if attention == "cudnn":
        context = jax.nn.dot_product_attention(query, key, value, implementation="cudnn")
    else:
        context = _attention(jax, query, key, value, keys[0], float(options["attention_dropout"]))
    joined = product(context.reshape(batch, length, hidden), to_joined, to_joined_bias)
    x = norm(x + dropped(joined, keys[1], float(options["output_dropout"])), *norms[:2])
    widened = _activation(jax, str(options["activation"]), product(x, widen, widen_bias))
    widened = dropped(widened, keys[2], float(options["activation_dropout"]))
    narrowed = product(widened, narrow, narrow_bias)
    return norm(x + dropped(narrowed, keys[3], float(options["feed_forward_dropout"])), *norms[2:])


def _product(jax: Any, x: Array, weight: Array, bias: Array) -> Array:
    """Return x @ weight.T + bias; in float32 the bias's gradient is summed as precisely as torch sums it."""
    return ((x @ weight.T).astype(jax.numpy.float32) + bias).astype(x.dtype)


def _attention(jax: Any, query: Array, key: Array, value: Array, random: Array, p: float) -> Array:
    """Return context (b, q, n, p) with dropout of weights; scores and weights are in the operands' dtype."""
    scores = jax.numpy.einsum("bqnp,bknp->bnqk", query, key).astype(jax.numpy.float32)
    weights = jax.nn.softmax(scores * query.shape[-1] ** -0.5, axis=-1).astype(query.dtype)
    return jax.numpy.einsum("bnqk,bknp->bqnp", _dropped(jax, weights, random, p), value)


def _dropped(jax: Any, x: Array, key: Array, p: float) -> Array:
    if p == 0:
        return x
    bits = jax.random.bits(key, x.shape, f"uint{KEPT_BITS}")
    keeps = bits >= round(p * 2**KEPT_BITS)
    return jax.numpy.where(keeps, x * (1 / (1 - p)), 0)


def _layer_norm(jax: Any, epsilon: float, x: Array, scale: Array, bias: Array) -> Array:
    wide = x.astype(jax.numpy.float32)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    variance = jax.numpy.square(centred).mean(axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + epsilon) * scale + bias).astype(x.dtype)


def _activation(jax: Any, name: str, x: Array) -> Array:
    if name == "relu":
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")


def jax_names(model: Model) -> tuple[str, ...]:
    """Return the sides that JAX has for a model: with cuDNN's attention, one that says so where it drops no weights."""
    return (PLAIN, WITHOUT_DROPOUT if float(model.options["attention_dropout"]) else CUDNN)


class JaxSide:
    """A compiled training step, warmed up.

    `peak_bytes` is what XLA's plan of the step's memory has beside its arguments: results and temporaries.
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
