"""Models of transformers with rotary embeddings, caps and norms that no rule reads: whole layers, eager's gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.runtime.capture.known import Compilation, assert_equal, gradients
from tests.runtime.capture.test_default_configurations import GPT2, LAYERS, SMALL, tokens

ALIKE = {name: size for name, size in SMALL.items() if name != "num_key_value_heads"}
OFF = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt-neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**ALIKE, **OFF)),
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**ALIKE)),
    "gpt-j": lambda: transformers.GPTJForCausalLM(
        transformers.GPTJConfig(**GPT2, rotary_dim=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, head_dim=8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_layers_run_tuned_and_gradients_are_those_of_eager(name: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]().double(), tokens()

    def loss(called: Any) -> Tensor:
        found: Tensor = called(**batch).loss
        return found

    wanted = gradients(model, loss)
    compilation = Compilation(model)
    tolerance = 1e-8 if name == "gpt-j" else 1e-12  # it computes attention in float32
    for _ in range(2):
        assert_equal(gradients(model, loss, compilation.model), wanted, tolerance)
    assert sum(graph.tuned_places for graph in compilation.compiled) == LAYERS
