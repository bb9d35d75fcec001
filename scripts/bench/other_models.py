"""Whole models of libraries and shapes that no rule was written for, for the benchmark of training steps."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput

from scripts.bench.whole_models import Batch, WholeModel, images, tokens

VOCABULARY = 32000


class WithLoss(nn.Module):
    """A network whose results are scores of classes, in the form of a model that is given labels and returns a loss."""

    def __init__(self, network: nn.Module, given: str) -> None:
        super().__init__()
        self.network, self.given = network, given

    def forward(self, labels: Tensor, **batch: Tensor) -> MaskedLMOutput:
        scores = self.network(batch[self.given])
        return MaskedLMOutput(loss=nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten()))


class Denoising(nn.Module):
    """A diffusion transformer with the loss of the noise that it predicts."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, labels: Tensor, **batch: Tensor) -> MaskedLMOutput:
        (found,) = self.network(**batch, return_dict=False)
        return MaskedLMOutput(loss=nn.functional.mse_loss(found.float(), labels.float()))


def _of_transformers(
    model: str, layers_name: str = "num_hidden_layers", config: str = "", **sizes: Any
) -> Callable[[int | None], nn.Module]:
    """Return what makes a model of the library; sizes are those of its configuration, whose class may be named."""

    def make(layers: int | None) -> nn.Module:
        given = sizes if layers is None else {**sizes, layers_name: layers}
        made: nn.Module = getattr(transformers, model)(
            getattr(transformers, config or model.partition("For")[0] + "Config")(**given)
        )
        return made

    return make


def _of_timm(entry: str, **sizes: Any) -> Callable[[int | None], nn.Module]:
    def make(layers: int | None) -> nn.Module:
        timm = importlib.import_module("timm")
        depth = {} if layers is None else {"depth": layers}
        return WithLoss(timm.create_model(entry, pretrained=False, **sizes, **depth), "pixel_values")

    return make


def _x_transformers(layers: int | None) -> nn.Module:
    library = importlib.import_module("x_transformers")
    stack = library.Decoder(dim=1024, depth=layers or 24, heads=16, attn_flash=True, rotary_pos_emb=True)
    network = library.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=1024, attn_layers=stack)
    return WithLoss(network, "input_ids")


def _dit(layers: int | None) -> nn.Module:
    library = importlib.import_module("diffusers")
    return Denoising(
        library.DiTTransformer2DModel(
            num_attention_heads=16, attention_head_dim=64, num_layers=layers or 24, sample_size=32, patch_size=2,
            in_channels=4, out_channels=4,
        )
    )  # fmt: skip


def _noise(device: str) -> Batch:
    generator = torch.Generator().manual_seed(0)
    noised, noise = torch.randn(2, 64, 4, 32, 32, generator=generator)
    numbers = {"timestep": torch.randint(0, 1000, (64,), generator=generator),
               "class_labels": torch.randint(0, 1000, (64,), generator=generator)}  # fmt: skip
    features = {"hidden_states": noised.bfloat16(), "labels": noise.bfloat16()}
    return {name: tensor.to(device) for name, tensor in (features | numbers).items()}


def _of_tokens(vocabulary: int, batch: int = 4, length: int = 1024, padded: bool = False) -> Callable[[str], Batch]:
    return lambda device: tokens(device, batch, length, vocabulary, padded)


def _speech(device: str) -> Batch:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(16, 80, 3000, generator=generator)
    labels = torch.randint(0, 50257, (16, 128), generator=generator)
    return {"input_features": features.to(device, torch.bfloat16), "labels": labels.to(device)}


OTHER_MODELS = {
    each.name: each
    for each in (
        WholeModel("qwen3-0.6b", _of_transformers(
            "Qwen3ForCausalLM", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
            num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True), _of_tokens(151936)),
        WholeModel("gpt-neox-410m", _of_transformers(
            "GPTNeoXForCausalLM", vocab_size=50304, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
            num_attention_heads=16, max_position_embeddings=2048), _of_tokens(50304)),
        WholeModel("phi-1.5", _of_transformers(
            "PhiForCausalLM", vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24,
            num_attention_heads=32, max_position_embeddings=2048, partial_rotary_factor=0.5), _of_tokens(51200)),
        WholeModel("gemma-2-2b", _of_transformers("Gemma2ForCausalLM"), _of_tokens(256000, 2)),
        WholeModel("gemma-3-1b", _of_transformers(
            "Gemma3ForCausalLM", config="Gemma3TextConfig", vocab_size=262144, hidden_size=1152, intermediate_size=6912,
            num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512),
            _of_tokens(262144, 2, 2048)),
        WholeModel("gpt-oss-small", _of_transformers(
            "GptOssForCausalLM", vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=1024, num_hidden_layers=12,
            num_attention_heads=16, num_key_value_heads=4, head_dim=64, num_local_experts=16, num_experts_per_tok=4),
            _of_tokens(VOCABULARY)),
        WholeModel("modernbert-large", _of_transformers(
            "ModernBertForMaskedLM", hidden_size=1024, intermediate_size=2624, num_hidden_layers=28,
            num_attention_heads=16), _of_tokens(50368, 8, 512)),
        WholeModel("qwen2-0.5b", _of_transformers(
            "Qwen2ForCausalLM", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
            num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True), _of_tokens(151936)),
        WholeModel("opt-1.3b", _of_transformers(
            "OPTForCausalLM", hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32,
            word_embed_proj_dim=2048), _of_tokens(50272)),
        WholeModel("roberta-large, autocast, padded", _of_transformers(
            "RobertaForMaskedLM", vocab_size=50265, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
            intermediate_size=4096, max_position_embeddings=514, type_vocab_size=1), _of_tokens(50265, 8, 512, True),
            torch.float32, torch.bfloat16),
        WholeModel("whisper-small", _of_transformers(
            "WhisperForConditionalGeneration", "encoder_layers", d_model=768, encoder_layers=12, decoder_layers=12,
            encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072),
            _speech),
        WholeModel("mixtral-small", _of_transformers(
            "MixtralForCausalLM", vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=3584, num_hidden_layers=8,
            num_attention_heads=16, num_key_value_heads=8), _of_tokens(VOCABULARY)),
        WholeModel("timm vit-large", _of_timm("vit_large_patch16_224"), images),
        WholeModel("timm swin-base", _of_timm("swin_base_patch4_window7_224"), images),
        WholeModel("x-transformers-400m", _x_transformers, _of_tokens(VOCABULARY)),
        WholeModel("dit-large", _dit, _noise),
    )
}  # fmt: skip
