"""A pre-norm encoder layer that is called with a causal mask: gpt-block as a module, against the framework."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotuner.ir.models import Model, load_model
from autotuner.runtime import TunedWarning, check, describe, time_peers
from autotuner.runtime.framework import MadeUpCall, causal_mask, encoder_layer
from autotuner.runtime.peers.stacked_layer import stacked_layer
from tests.runtime.layers import assert_equal, batch, gradients, tuned
from tests.runtime.plans import SITES, TINY, configuration

pytestmark = pytest.mark.slow


def block(p: float = 0.0, dtype: str = "float64") -> Model:
    return load_model("gpt-block").instantiate(extents=TINY, dtype=dtype, options=dict.fromkeys(SITES, p))


def causal(x: Tensor) -> dict[str, Any]:
    return {"src_mask": causal_mask(x), "is_causal": True}


def test_it_is_described_as_the_model_that_it_is() -> None:
    found, of = describe(encoder_layer(block(0.25))), block(0.25)
    assert (found.model, found.extents, found.options) == ("gpt-block", {"h": 8, "n": 2, "p": 4, "f": 12}, of.options)


@pytest.mark.parametrize("seed", range(3))
def test_a_tuned_one_equals_the_framework_and_a_stacked_one_too(seed: int) -> None:
    layer = encoder_layer(block())
    twin, made = copy.deepcopy(layer), tuned(layer, configuration(block(), seed))
    wanted = gradients(twin, batch(), **causal(batch()))
    assert_equal(gradients(made, batch(), **causal(batch())), wanted)
    assert (made.calls, dict(made.fallbacks)) == (1, {})
    stacked = gradients(stacked_layer(block(), device="cpu"), batch(), **causal(batch()))
    assert_equal(stacked, {name.replace("self_attn.", ""): value for name, value in wanted.items()}, 1e-10)


def test_with_dropout_it_equals_its_graph_under_the_masks_that_it_drew() -> None:
    assert check(configuration(block(0.3), 1)).ok


@pytest.mark.parametrize(
    "arguments", [{}, {"src_mask": torch.zeros(6, 6, dtype=torch.float64)}], ids=["none", "not causal"]
)
def test_a_call_that_is_not_causal_runs_the_original(arguments: dict[str, Any]) -> None:
    layer = encoder_layer(block())
    twin, made = copy.deepcopy(layer), tuned(layer, configuration(block()))
    with pytest.warns(TunedWarning, match="is_causal=True"):
        found = gradients(made, batch(), **arguments)
    assert_equal(found, gradients(twin, batch(), **arguments))
    assert dict(made.fallbacks) == {"src_mask": 1}


def test_it_runs_tuned_in_a_compiled_model_and_the_original_where_the_module_is_in_another_mode() -> None:
    layer = encoder_layer(block(0.3))
    twin, made = copy.deepcopy(layer), tuned(layer, configuration(block(0.3)))
    compiled: nn.Module = torch.compile(made, backend="aot_eager", dynamic=False)  # type: ignore[assignment]
    compiled(batch(), **causal(batch()))
    assert made.calls == 1
    torch.testing.assert_close(made.call_original(batch(), None).shape, twin(batch(), **causal(batch())).shape)
    made.eval()
    with pytest.warns(TunedWarning, match="eval mode"):
        torch.testing.assert_close(made(batch(), **causal(batch())), twin.eval()(batch(), **causal(batch())))


def test_its_peers_are_timed_beside_it() -> None:
    found = time_peers(configuration(block(dtype="float32")), samples=2)
    assert set(found.peers_us) >= {"eager"}


def test_a_made_up_call_has_a_causal_mask() -> None:
    masks = MadeUpCall.of(block()).masks
    assert masks["is_causal"]
    assert torch.equal(masks["src_mask"] == 0, torch.ones(6, 6, dtype=torch.bool).tril())
