import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from autotuner.errors import ConfigurationError
from autotuner.runtime import TunedWarning, apply, describe
from tests.runtime.bert_layers import KEEPS, additive, bert_layer
from tests.runtime.layers import assert_equal, batch, gradients, tuned
from tests.runtime.plans import MASKED, configuration, model


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_it_equals_the_library_and_shares_its_parameters(seed: int) -> None:
    layer = bert_layer()
    twin = copy.deepcopy(layer)
    made = tuned(layer, configuration(model(), seed))
    assert_equal(gradients(made, batch()), gradients(twin, batch()))
    assert list(made.state_dict()) == list(twin.state_dict())
    assert all(one is other for one, other in zip(made.parameters(), layer.parameters(), strict=True))
    assert made.calls == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [
        additive(KEEPS),
        additive(KEEPS).expand(2, 1, 6, 6),
        additive(KEEPS).expand(2, 1, 6, 6).contiguous(),
        KEEPS[:, None, None].expand(2, 1, 6, 6),
    ],
    ids=["extended", "expanded", "repeated", "boolean"],
)
def test_masks_over_keys_in_the_librarys_forms_run_tuned(mask: Tensor) -> None:
    layer = bert_layer(hidden_act="gelu_new")
    twin = copy.deepcopy(layer)
    made = tuned(layer, configuration(MASKED, 1))
    assert_equal(gradients(made, batch(), attention_mask=mask), gradients(twin, batch(), attention_mask=mask))
    assert (made.calls, dict(made.fallbacks)) == (1, {})


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(2, 1, 1, 6, dtype=torch.float64),
        torch.zeros(1, 1, 6, 6, dtype=torch.float64),
        torch.zeros(2, 2, 6, 6, dtype=torch.float32),
        torch.ones(2, 1, 1, 6, dtype=torch.bool).expand(2, 1, 6, 6),
        torch.ones(2, 1, 6, 6, dtype=torch.bool),
    ],
    ids=["additive", "square", "heads", "expanded", "boolean"],
)
def test_a_mask_that_masks_nothing_runs_tuned_with_and_without_masks(mask: Tensor, masked: bool) -> None:
    layer = bert_layer(hidden_act="gelu_new")
    twin = copy.deepcopy(layer)
    made = tuned(layer, configuration(MASKED if masked else model(activation="gelu_tanh"), 1))
    wanted = gradients(twin, batch(), attention_mask=mask.to(torch.float64) if mask.is_floating_point() else mask)
    assert_equal(gradients(made, batch(), attention_mask=mask), wanted)
    assert (made.calls, dict(made.fallbacks)) == (1, {})


@pytest.mark.slow
def test_a_plan_for_calls_without_a_mask_and_one_for_calls_with_it_share_a_layer() -> None:
    layer = bert_layer(hidden_act="gelu_new")
    twin = copy.deepcopy(layer)
    made: Any = apply(layer, [configuration(model(activation="gelu_tanh"), 1), configuration(MASKED, 1)])
    plain, masked = made.bind()
    for mask, binding in ((None, plain), (additive(KEEPS), masked), (torch.zeros(2, 1, 1, 6).double(), plain)):
        before = binding.pool.made
        assert_equal(gradients(made, batch(), attention_mask=mask), gradients(twin, batch(), attention_mask=mask))
        assert made.covering(batch(), mask)[0] is binding
        assert binding.pool.made == max(1, before)
    assert (made.calls, dict(made.fallbacks)) == (3, {})


def test_a_mask_that_differs_between_queries_runs_the_original() -> None:
    layer = bert_layer(hidden_act="gelu_new")
    twin = copy.deepcopy(layer)
    made = tuned(layer, configuration(MASKED, 1))
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    with pytest.warns(TunedWarning, match="differs between queries"):
        found = made(batch(), attention_mask=mask)
    torch.testing.assert_close(found, twin(batch(), attention_mask=mask))
    assert made.fallbacks == {"mask": 1}


def test_what_it_does_not_know_runs_the_original() -> None:
    made = tuned(bert_layer(), configuration(model(), 2))
    with pytest.warns(TunedWarning, match="output_attentions"):
        made(batch(), output_attentions=True)
    made(batch(), None, None, encoder_attention_mask=None, past_key_values=None, position_ids=None, use_cache=False)
    assert (made.calls, dict(made.fallbacks)) == (1, {"output_attentions": 1})


@pytest.mark.slow
def test_a_whole_model_trains_with_tuned_layers() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=8, num_attention_heads=2, intermediate_size=12, num_hidden_layers=2, vocab_size=11,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-5, hidden_act="gelu_new",
    )  # fmt: skip
    whole = BertModel(config, add_pooling_layer=False).double()
    twin = copy.deepcopy(whole)
    found = configuration(MASKED, 0)
    layers: Any = whole.encoder.layer
    for number in range(2):
        layers[number] = apply(layers[number], found)
    words, mask = torch.arange(12).view(2, 6) % 11, KEEPS.long()
    for net in (whole, twin):
        net(words, attention_mask=mask).last_hidden_state.square().sum().backward()
    for (name, one), other in zip(whole.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10, msg=name)
    assert [layer.calls for layer in layers] == [1, 1]


@pytest.mark.parametrize("name, kind", [("gelu", "gelu_erf"), ("gelu_new", "gelu_tanh"), ("relu", "relu")])
def test_activations_are_told_apart(name: str, kind: str) -> None:
    assert describe(bert_layer(hidden_act=name)).options["activation"] == kind


def test_a_decoder_and_an_unknown_activation_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="decoder"):
        describe(bert_layer(is_decoder=True))
    with pytest.raises(ConfigurationError, match="activation SiLU"):
        describe(bert_layer(hidden_act="silu"))
