"""Layers of a model as regions: of models whose first layer reads otherwise, or where nothing else repeats."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autotuner.api.survey import region_calls
from autotuner.ir.models import Model
from autotuner.runtime.capture.layers import bare_path, layer_calls
from autotuner.runtime.capture.program import LayerCall
from tests.runtime.capture.known import Compilation, assert_equal, gradients

VOCABULARY, LENGTH, LAYERS = 64, 12, 3
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
         "num_attention_heads": 4, "max_position_embeddings": 32, **SPECIAL}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
MPT = {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": LAYERS, "n_heads": 4, "max_seq_len": 32, **SPECIAL}
M2M = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
       "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
       "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "decoder_start_token_id": 3,
       "max_position_embeddings": 32, **SPECIAL}  # fmt: skip

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**GROUPED, head_dim=8)),
    "nemotron": lambda: transformers.NemotronForCausalLM(transformers.NemotronConfig(**GROUPED)),
    "mpt": lambda: transformers.MptForCausalLM(transformers.MptConfig(**MPT)),
    "modernbert": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**SMALL, cls_token_id=3, sep_token_id=4)
    ),
    "albert": lambda: transformers.AlbertForMaskedLM(transformers.AlbertConfig(**SMALL, embedding_size=16)),
    "m2m": lambda: transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**M2M)),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]()
    for part in model.modules():  # where it draws masks, no two runs are equal
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for rate in ("dropout", "attention_dropout", "activation_dropout", "attn_dropout_p"):
            if isinstance(getattr(part, rate, None), float):
                setattr(part, rate, 0.0)
    return model


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(5, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def kinds(model: Model) -> list[str]:
    return [operator.kind for operator in model.graph().operators]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "different"), [("gemma", 1), ("nemotron", 1), ("mpt", 1), ("modernbert", 2), ("albert", 1)]
)
def test_each_layer_is_one_region(name: str, different: int) -> None:
    """The first layer of ModernBERT has no norm before its attention; all others are alike."""
    found = region_calls(made(name), [tokens()])
    assert sum(found.runs.values()) == LAYERS
    assert len(found.models) == different
    for model in found.models.values():
        assert kinds(model).count("softmax") == 1
        assert sum(kinds(model).count(kind) for kind in ("add", "contraction")) >= 8  # two branches and their sums


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_layers_are_those_of_eager(name: str) -> None:
    model, batch = made(name).double(), tokens()

    def loss(called: Any) -> Tensor:
        found: Tensor = called(**batch).loss
        return found

    wanted = gradients(model, loss)
    compilation = Compilation(model)
    assert_equal(gradients(model, loss, compilation.model), wanted, 1e-12)
    assert sum(graph.tuned_places for graph in compilation.compiled) == (2 if name == "m2m" else LAYERS)


class Block(nn.Module):
    """A layer with its norms first, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.Linear(16, 48)
        self.out, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.first(x)).view(2, 8, 3, 4, 4).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(2, 8, 16))
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return found


def test_a_layer_that_is_compiled_by_itself_is_one_region() -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 8, 16)
    ((key, region),) = (found := region_calls(block, [(x,)])).models.items()
    assert found.runs[key] == 1
    assert kinds(region).count("contraction") == 8
    assert kinds(region).count("add") == 2


def test_a_head_behind_a_layer_is_no_part_of_it() -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"block": Block(), "head": nn.Linear(16, 40)}), torch.randn(2, 8, 16)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.parts["head"](self.parts["block"](x))
            return found

    (region,) = region_calls(Classifier(), [(x,)]).models.values()
    assert kinds(region).count("add") == 2
    assert 40 not in region.graph().extents.values()


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return found


class Narrowing(nn.Module):
    """Layers of one class, of which no two compute alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(2))
        self.layers[1].up, self.layers[1].down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_of_one_class_count_as_several_whatever_they_compute() -> None:
    torch.manual_seed(0)
    found = region_calls(Narrowing(), [(torch.randn(2, 8, 16),)])
    assert sorted(found.runs.values()) == [1, 1]


def test_layers_are_read_from_the_modules_that_call() -> None:
    stack = {
        "1": ("L['self']", Block),
        "2@1": ("L['self'].stages.0", Mixer),
        "3@1": ("L['self'].stages.0.h.4.up", Block),
    }
    assert layer_calls(stack) == (
        LayerCall("stages.*", "Mixer", "stages.0", "1"),
        LayerCall("stages.0.h.*", "", "stages.0.h.4", "1"),
    )
    assert layer_calls(None) == ()


@pytest.mark.parametrize(
    "path",
    [
        "L['self'].blocks.2.attn",
        "L['self']._modules['blocks'].2.attn",
        "L['self'].forward.__self__.blocks.2.attn",
        "G['model'].blocks.2.forward.__self__.attn",
        "G['model'].__dict__['_modules']['blocks'].2.attn",
        "L['self'].__dict__['_modules']['blocks']._modules['2'].attn",
    ],
)
def test_paths_of_modules_are_those_of_named_modules(path: str) -> None:
    assert bare_path(path) == "blocks.2.attn"
