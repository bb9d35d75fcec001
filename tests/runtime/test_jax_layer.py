"""The layer in JAX: the framework's values, dropout at every site, and its turns beside the other sides, on the CPU."""

import os
from typing import Any

import numpy as np
import pytest
import torch

from autotuner.errors import ConfigurationError
from autotuner.ir.models import Model
from autotuner.runtime import TunedWarning
from autotuner.runtime.framework import MadeUpCall, encoder_layer
from scripts.bench import jax_layer
from scripts.bench.all_peers import TakesTurns, add_jax
from scripts.bench.jax_layer import PLAIN, WITHOUT_DROPOUT, JaxSide, arguments, imported, jax_names, training_step
from tests.runtime.plans import MASKED, SITES, model

pytestmark = pytest.mark.slow

jax = pytest.importorskip("jax")
P = 0.25


def stepped(of: Model, *seeds: int) -> list[dict[str, Any]]:
    """Return what one training step gives for each seed: y, the gradients and the next key."""
    *given, _ = arguments(of, MadeUpCall.of(of), "cpu")
    step = jax.jit(training_step(of))
    found = []
    for seed in seeds:
        y, grad_x, grads, following = step(*given, jax.random.key(seed, impl="rbg"))
        found.append({"y": y, "x": grad_x, **grads, "key": following})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["relu", "gelu_erf", "gelu_tanh"])
def test_y_and_all_gradients_equal_the_frameworks(activation: str) -> None:
    of = model(dtype="float32", activation=activation)
    layer, call = encoder_layer(of), MadeUpCall.of(of)
    y = layer(call.x)
    y.backward(call.grad_y)
    wanted = {"y": y, "x": call.x.grad} | {name: parameter.grad for name, parameter in layer.named_parameters()}
    (found,) = stepped(of, 0)
    assert {*found} == {*wanted, "key"}
    for name, value in wanted.items():
        assert value is not None
        np.testing.assert_allclose(found[name], value.detach(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_have_the_models_dtype(dtype: str) -> None:
    of = model(dtype=dtype, p=P)
    *results, _ = jax.eval_shape(training_step(of), *arguments(of, MadeUpCall.of(of), "cpu"))
    assert {str(value.dtype) for value in jax.tree.leaves(results)} == {dtype}


@pytest.mark.slow
@pytest.mark.parametrize("site", SITES)
def test_each_site_drops_by_the_key_that_it_is_given(site: str) -> None:
    options: dict[str, Any] = {site: P}
    one, again, other = stepped(model(dtype="float32", **options), 1, 1, 2)
    assert np.array_equal(one["y"], again["y"])
    assert not np.array_equal(one["y"], other["y"])
    assert not np.array_equal(jax.random.key_data(one["key"]), jax.random.key_data(jax.random.key(1, impl="rbg")))


def test_kept_elements_are_scaled_so_that_the_mean_stays() -> None:
    ones = jax.numpy.ones(100_000)
    found = np.asarray(jax_layer._dropped(jax, ones, jax.random.key(0, impl="rbg"), P))
    assert {*np.unique(found)} == {np.float32(0), np.float32(1 / (1 - P))}
    assert abs(float(found.mean()) - 1) < 0.01  # six deviations


def test_a_model_with_an_attention_mask_or_in_float64_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no attention mask"):
        training_step(MASKED)
    with pytest.raises(ConfigurationError, match="not for float64"):
        training_step(model(dtype="float64"))


def test_cudnns_attention_is_named_by_what_it_leaves_out() -> None:
    assert jax_names(model(p=P)) == ("jax", "jax cudnn, no dropout of weights")
    assert jax_names(model(p=P, attention_dropout=0.0)) == ("jax", "jax cudnn")


@pytest.mark.slow
def test_a_side_takes_turns_and_knows_the_memory_of_its_step() -> None:
    of = model(dtype="float32", p=P)
    side = JaxSide(PLAIN, of, 100.0, "cpu")
    assert side.turn_us() > 0
    results = sum(value.numel() * 4 for value in (*encoder_layer(of).parameters(), *[MadeUpCall.of(of).x] * 2))
    assert side.peak_bytes is not None
    assert side.peak_bytes >= results


@pytest.mark.slow
def test_sides_that_do_not_run_are_left_out_with_their_reason() -> None:
    sides: dict[str, TakesTurns] = {}
    with pytest.warns(TunedWarning, match="no dropout of weights is not among the sides"):
        add_jax(sides, model(dtype="bfloat16", p=P), "cpu")  # there is no cuDNN on a CPU
    assert {*sides} == {PLAIN}
    assert WITHOUT_DROPOUT not in sides


def test_without_jax_there_are_no_sides_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.bench.all_peers.is_installed", lambda: False)
    sides: dict[str, TakesTurns] = {}
    add_jax(sides, model(dtype="float32"), "cpu")
    assert sides == {}


@pytest.mark.parametrize("given", [None, "true"])
def test_jax_leaves_memory_to_others_unless_the_user_says_more(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    imported()
    assert os.environ[name] == (given or "false")


def test_a_cuda_side_without_such_a_device_fails() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(RuntimeError):
        JaxSide(PLAIN, model(dtype="float32"), 100.0)
