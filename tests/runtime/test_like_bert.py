"""Layers of Hugging Face that are BertLayer by another name."""

import ast
import copy
import inspect
import pickle
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotuner
from autotuner.errors import ConfigurationError
from autotuner.runtime import TunedModule, TunedWarning, apply, describe
from tests.runtime.bert_layers import KEEPS, LIKE_BERT, additive, bert_layer
from tests.runtime.layers import assert_equal, batch, gradients, tuned
from tests.runtime.plans import MASKED, configuration, model

OTHERS = [family for family in LIKE_BERT if family != "bert"]
PARTS = ("SelfAttention", "SelfOutput", "Attention", "Intermediate", "Output", "Layer")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.slow
def test_it_equals_its_original_in_output_and_every_gradient(family: str, attention: str) -> None:
    layer = bert_layer(family, attention)
    twin = copy.deepcopy(layer)
    made = tuned(layer, configuration(model(), 1))
    assert_equal(gradients(made, batch()), gradients(twin, batch()))
    assert isinstance(made, type(twin))
    assert all(one is other for one, other in zip(made.parameters(), layer.parameters(), strict=True))
    assert (made.calls, dict(made.fallbacks)) == (1, {})


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.slow
def test_masks_run_tuned_and_what_it_does_not_know_runs_its_own_original(family: str) -> None:
    layer = bert_layer(family, "eager", hidden_act="gelu_new")
    twin = copy.deepcopy(layer)
    made = tuned(layer, configuration(MASKED, 1))
    mask = additive(KEEPS)
    assert_equal(gradients(made, batch(), attention_mask=mask), gradients(twin, batch(), attention_mask=mask))
    short = batch()[:1]
    with pytest.warns(TunedWarning, match=f"the original {LIKE_BERT[family]} runs"):
        assert_equal(gradients(made, short), gradients(twin, short))
    assert (made.calls, dict(made.fallbacks)) == (1, {"shape": 1})


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.slow
def test_it_is_copied_and_pickled_as_what_it_is(family: str) -> None:
    made = tuned(bert_layer(family), configuration(model(), 1))
    wanted = gradients(made, batch())
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(again) is type(made)
        assert_equal(gradients(again, batch()), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_the_librarys_code_of_it_is_that_of_bert(family: str) -> None:
    def code(of: str) -> str:
        name = LIKE_BERT[of].removesuffix("Layer")
        file = sys.modules[type(bert_layer(of)).__module__]
        texts = [inspect.getsource(getattr(file, name + part)) for part in PARTS]
        texts.append(inspect.getsource(file.eager_attention_forward))
        return re.sub(r'(?s)""".*?"""', "", ast.unparse(ast.parse("\n".join(texts)))).replace(name, "Bert")

    assert code(family) == code("bert")


def test_an_attention_that_is_not_the_librarys_own_is_refused_before_and_runs_the_original_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def halved(*given: Any, **_: Any) -> tuple[Tensor, None]:
        value = given[3]
        return value.transpose(1, 2) / 2, None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "halved", halved)
    with pytest.raises(ConfigurationError, match="its attention is 'halved', which is none of the library's own"):
        describe(bert_layer("roberta", "halved"))
    layer = bert_layer("roberta")
    twin: Any = copy.deepcopy(layer)
    made: Any = tuned(layer, configuration(model(), 1))
    for one in (made, twin):
        one.attention.self.config._attn_implementation = "halved"
    with pytest.warns(TunedWarning, match="its attention is 'halved'"):
        found = made(batch())
    torch.testing.assert_close(found, twin(batch()))


@pytest.mark.slow
def test_a_whole_model_is_refused_with_the_names_of_its_layers() -> None:
    from transformers import RobertaConfig, RobertaModel

    config = RobertaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=12, num_hidden_layers=8,
                           vocab_size=11, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                           layer_norm_eps=1e-5)  # fmt: skip
    whole: Any = RobertaModel(config, add_pooling_layer=False).double()
    sentence = (
        r"RobertaModel cannot be tuned as a whole; its layers can: encoder\.layer\.0, .*encoder\.layer\.5 and 2 more "
        r"\(RobertaLayer\)\. Tune one, module\.get_submodule\('encoder\.layer\.0'\), and put what apply returns"
    )
    for attempt in (lambda: apply(whole, configuration(model())), lambda: autotuner.tune(whole, extents={"b": 2})):
        with pytest.raises(ConfigurationError, match=sentence):
            attempt()
    for number, layer in enumerate(whole.encoder.layer):
        whole.encoder.layer[number] = apply(layer, configuration(model()))
    whole(torch.arange(12).view(2, 6) % 11).last_hidden_state.sum().backward()
    assert sum(isinstance(layer, TunedModule) and layer.calls for layer in whole.encoder.layer) == 8


def test_a_subclass_is_told_to_give_the_class_itself() -> None:
    class Own(nn.TransformerEncoderLayer):
        pass

    with pytest.raises(ConfigurationError, match=r"Own cannot be tuned: it is a subclass of TransformerEncoderLayer"):
        describe(Own(8, 2))
