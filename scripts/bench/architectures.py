"""Architectures for scripts/coverage: default configurations but for sizes, random weights, and a batch for each."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, ROWS, LENGTH, WIDTH, INNER, HEADS, LAYERS = 64, 2, 16, 64, 128, 4, 3
IMAGE, PATCH, CLASSES = 32, 8, 10

Made = tuple[nn.Module, Mapping[str, Any] | tuple[Any, ...]]


@dataclass(frozen=True)
class Architecture:
    """A model in small, and a batch for it.

    Args:
        family: the library that it is of, or "own code".
        make: returns the model and what it is called with, by name or by position.
        needs: the package that must be installed for it, where `family` is not its name.
        layers: part of the path of the layers that count as repeated; by default all modules with a number do.
    """

    name: str
    family: str
    make: Callable[[], Made]
    needs: str = ""
    layers: str = ""


def token_ids(length: int = LENGTH) -> Tensor:
    """Return random tokens; the first few of the vocabulary are left to special ones."""
    return torch.randint(5, VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(0))


def images(extent: int = IMAGE, channels: int = 3) -> Tensor:
    return torch.randn(ROWS, channels, extent, extent, generator=torch.Generator().manual_seed(0))


def features(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
TEXT = {"vocab_size": VOCABULARY, **SPECIAL}
SIZES = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
GROUPED = TEXT | SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 64}
FULL = GROUPED | {"num_key_value_heads": HEADS}
ENCODER = TEXT | SIZES | {"max_position_embeddings": 64}
GPT = TEXT | {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
WHISPER = {"vocab_size": VOCABULARY, **SPECIAL, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
           "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": INNER,
           "decoder_ffn_dim": INNER, "decoder_start_token_id": 3}  # fmt: skip
T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 16, "d_ff": INNER, "num_layers": LAYERS, "num_heads": HEADS,
      "decoder_start_token_id": 0, "pad_token_id": 2, "eos_token_id": 1}  # fmt: skip
SOUND = {**TEXT, **SIZES, "conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2),
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
         "mask_time_prob": 0.0}  # fmt: skip
VISION = SIZES | {"image_size": IMAGE, "patch_size": PATCH, "num_labels": CLASSES}

CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", GPT),
    "OPT": ("OPTForCausalLM", ENCODER | {"ffn_dim": INNER, "word_embed_proj_dim": WIDTH}),
    "LLaMA": ("LlamaForCausalLM", GROUPED),
    "Mistral": ("MistralForCausalLM", GROUPED),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 16}),
    "OLMo2": ("Olmo2ForCausalLM", GROUPED),
    "SmolLM3": ("SmolLM3ForCausalLM", GROUPED),
    "Granite": ("GraniteForCausalLM", GROUPED),
    "Starcoder2": ("Starcoder2ForCausalLM", GROUPED),
    "Phi-3": ("Phi3ForCausalLM", GROUPED),
    "StableLM": ("StableLmForCausalLM", FULL),
    "GPT-NeoX": ("GPTNeoXForCausalLM", ENCODER),
    "Phi": ("PhiForCausalLM", FULL),
    "GPT-J": ("GPTJForCausalLM", GPT | {"rotary_dim": 8}),
    "Falcon": ("FalconForCausalLM", TEXT | {k: v for k, v in SIZES.items() if k != "intermediate_size"}),
    "Cohere": ("CohereForCausalLM", GROUPED),
    "Nemotron": ("NemotronForCausalLM", GROUPED),
    "GLM-4": ("Glm4ForCausalLM", GROUPED | {"head_dim": 16}),
    "Gemma": ("GemmaForCausalLM", GROUPED | {"head_dim": 16}),
    "Gemma 2": ("Gemma2ForCausalLM", GROUPED | {"head_dim": 16}),
    "Gemma 3": ("Gemma3ForCausalLM", GROUPED | {"head_dim": 16, "sliding_window": 8}),
    "BLOOM": ("BloomForCausalLM", TEXT | {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS}),
    "MPT": ("MptForCausalLM", TEXT | {"d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 64}),
    "Mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}),
    "OLMoE": ("OlmoeForCausalLM", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", GROUPED | EXPERTS | {"num_experts": 4, "head_dim": 16}),
    "GPT-OSS": ("GptOssForCausalLM", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", FULL | EXPERTS | LATENT | {"n_routed_experts": 4, "n_group": 2,
                    "topk_group": 1, "first_k_dense_replace": 1}),
    "Qwen3-Next": ("Qwen3NextForCausalLM", GROUPED | EXPERTS | {"num_experts": 4, "head_dim": 16,
                   "shared_expert_intermediate_size": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                   "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 4}),
    "Mamba": ("MambaForCausalLM", TEXT | {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 8}),
}  # fmt: skip
MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BertForMaskedLM", ENCODER),
    "RoBERTa": ("RobertaForMaskedLM", ENCODER),
    "ELECTRA": ("ElectraForMaskedLM", ENCODER | {"embedding_size": WIDTH}),
    "ALBERT": ("AlbertForMaskedLM", ENCODER | {"embedding_size": 32}),
    "DistilBERT": ("DistilBertForMaskedLM", TEXT | {"dim": WIDTH, "hidden_dim": INNER, "n_layers": LAYERS,
                   "n_heads": HEADS}),
    "MPNet": ("MPNetForMaskedLM", ENCODER),
    "ESM": ("EsmForMaskedLM", ENCODER | {"mask_token_id": 3}),
    "DeBERTa-v2": ("DebertaV2ForMaskedLM", ENCODER),
    "DeBERTa-v3": ("DebertaV2ForMaskedLM", ENCODER | {"relative_attention": True, "position_buckets": 8,
                   "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm"}),
    "ModernBERT": ("ModernBertForMaskedLM", ENCODER | {"cls_token_id": 3, "sep_token_id": 4}),
}  # fmt: skip
SEQUENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "T5": ("T5ForConditionalGeneration", T5),
    "mT5": ("MT5ForConditionalGeneration", T5),
    "BART": ("BartForConditionalGeneration", WHISPER | {"max_position_embeddings": 64}),
    "Pegasus": ("PegasusForConditionalGeneration", WHISPER | {"max_position_embeddings": 64}),
    "M2M-100": ("M2M100ForConditionalGeneration", WHISPER | {"max_position_embeddings": 64}),
}
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViTForImageClassification", VISION),
    "DeiT": ("DeiTForImageClassification", VISION),
    "BEiT": ("BeitForImageClassification", VISION),
    "DINOv2": ("Dinov2ForImageClassification", VISION),
    "SigLIP vision": ("SiglipVisionModel", VISION),
    "CLIP vision": ("CLIPVisionModel", VISION),
    "Swin": ("SwinForImageClassification", {"image_size": 64, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4],
             "window_size": 4, "num_labels": CLASSES}),
    "SegFormer": ("SegformerForImageClassification", {"hidden_sizes": [32, 64], "depths": [2, 2],
                  "num_attention_heads": [1, 2], "sr_ratios": [4, 2], "num_encoder_blocks": 2, "patch_sizes": [7, 3],
                  "strides": [4, 2], "mlp_ratios": [4, 4], "num_labels": CLASSES}),
    "ConvNeXt V2": ("ConvNextV2ForImageClassification", {"hidden_sizes": [32, 64], "depths": [2, 2], "num_stages": 2,
                    "image_size": 64, "num_labels": CLASSES}),
}  # fmt: skip


def of_transformers(class_name: str, sizes: Mapping[str, Any]) -> Any:
    """Return a model of transformers with the configuration that its class has by default, but for these values."""
    import transformers

    made = getattr(transformers, class_name)
    config_class = made.config_class
    if class_name == "Gemma3ForCausalLM":
        config_class = transformers.Gemma3TextConfig
    return made(config_class(**sizes))


def _text(class_name: str, sizes: Mapping[str, Any]) -> Callable[[], Made]:
    def make() -> Made:
        ids = token_ids()
        return of_transformers(class_name, sizes), {"input_ids": ids, "labels": ids}

    return make


def _image(class_name: str, sizes: Mapping[str, Any]) -> Callable[[], Made]:
    def make() -> Made:
        labels = {} if class_name.endswith("VisionModel") else {"labels": torch.tensor([1, 3])}
        return of_transformers(class_name, sizes), {"pixel_values": images(sizes.get("image_size", 64)), **labels}

    return make


def _whisper() -> Made:
    sizes = WHISPER | {"max_source_positions": 16, "max_target_positions": 64, "num_mel_bins": 16}
    model = of_transformers("WhisperForConditionalGeneration", sizes)
    return model, {"input_features": features(ROWS, 16, 32), "labels": token_ids()}


def _sound(class_name: str) -> Callable[[], Made]:
    def make() -> Made:
        return of_transformers(class_name, SOUND), {"input_values": features(ROWS, 400), "labels": token_ids(4)}

    return make


def _clip() -> Made:
    import transformers

    text = TEXT | SIZES | {"max_position_embeddings": 64}
    config = transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=32)
    return transformers.CLIPModel(config), {"input_ids": token_ids(), "pixel_values": images(), "return_loss": True}


OF_IMAGES = 4
"""Tokens of each image in a text."""
IMAGE_TOKENS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 58, "vision_end_token_id": 59}


def _with_images() -> dict[str, Tensor]:
    """Return a text with an image between its tokens, as processors of transformers make it."""
    made = token_ids().clamp(max=50)
    made[:, 4 : 4 + OF_IMAGES] = IMAGE_TOKENS["image_token_id"]
    return {"input_ids": made, "labels": made.masked_fill(made == IMAGE_TOKENS["image_token_id"], -100)}


def _of_image_and_text(
    class_name: str, pixels: tuple[int, ...], vision: Mapping[str, Any], text: Mapping[str, Any], **given: Any
) -> Callable[[], Made]:
    """Return what makes a model that reads an image in each of its texts; `given` are of its configuration."""

    def make() -> Made:
        import transformers

        config = getattr(transformers, class_name.partition("For")[0] + "Config")(
            text_config=dict(text),
            vision_config=dict(vision),
            image_token_id=IMAGE_TOKENS["image_token_id"],
            **given,
        )
        return getattr(transformers, class_name)(config), _with_images() | {"pixel_values": features(*pixels)}

    return make


def _qwen_vl() -> Made:
    """Images of several sizes: patches of all of them in one sequence, and the sizes beside them."""
    import transformers

    patches, vision = (IMAGE // PATCH) ** 2, {"depth": LAYERS, "num_heads": HEADS, "patch_size": PATCH}
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2_5_VLConfig(
        text_config=GROUPED | {"rope_parameters": rotary},
        vision_config=vision | {"hidden_size": WIDTH, "intermediate_size": INNER, "out_hidden_size": WIDTH,
                                "window_size": IMAGE, "fullatt_block_indexes": [1]},
        **IMAGE_TOKENS,
    )  # fmt: skip
    batch = _with_images()
    return transformers.Qwen2_5_VLForConditionalGeneration(config), batch | {
        "pixel_values": features(ROWS * patches, 3 * 2 * PATCH**2),
        "image_grid_thw": torch.tensor([[1, IMAGE // PATCH, IMAGE // PATCH]] * ROWS),
        "mm_token_type_ids": (batch["input_ids"] == IMAGE_TOKENS["image_token_id"]).int(),
    }


def _video() -> Made:
    sizes = VISION | {"num_frames": 4, "tubelet_size": 2}
    return of_transformers("VideoMAEForVideoClassification", sizes), {
        "pixel_values": features(ROWS, 4, 3, IMAGE, IMAGE),
        "labels": torch.tensor([1, 3]),
    }


def _padded(class_name: str, sizes: Mapping[str, Any]) -> Callable[[], Made]:
    """Return what makes a model whose batch has padding, as a data loader of text gives it."""

    def make() -> Made:
        model, batch = _text(class_name, sizes)()
        ids = batch["input_ids"] if isinstance(batch, Mapping) else batch[0]
        mask = torch.ones_like(ids)
        mask[0, LENGTH - 5 :] = 0
        labels = ids.masked_fill(mask == 0, -100)
        return model, {"input_ids": ids.masked_fill(mask == 0, 2), "attention_mask": mask, "labels": labels}

    return make


LLAMA = {"model_type": "llama", **GROUPED}
OF_CLIP = {"model_type": "clip_vision_model", **VISION, "patch_size": IMAGE // 2}
IMAGES_AND_TEXTS: dict[str, Callable[[], Made]] = {
    "LLaVA": _of_image_and_text(
        "LlavaForConditionalGeneration", (ROWS, 3, IMAGE, IMAGE), OF_CLIP, LLAMA,
    ),
    "Gemma 3 with images": _of_image_and_text(
        "Gemma3ForConditionalGeneration", (ROWS, 3, IMAGE, IMAGE), VISION, GROUPED | {"head_dim": 16},
        mm_tokens_per_image=OF_IMAGES,
    ),
    "SmolVLM": _of_image_and_text(
        "SmolVLMForConditionalGeneration", (ROWS, 1, 3, IMAGE, IMAGE), VISION, LLAMA, scale_factor=2,
    ),
    "Qwen2.5-VL": _qwen_vl,
}  # fmt: skip


def transformers_architectures() -> list[Architecture]:
    text = {**CAUSAL, **MASKED, **SEQUENCES}
    found = [Architecture(name, "transformers", _text(*given)) for name, given in text.items()]
    found += [Architecture(name, "transformers", _image(*given)) for name, given in CLASSIFIERS.items()]
    padded = {name: text[name] for name in ("BERT", "LLaMA", "GPT-2", "T5")}
    found += [Architecture(f"{name}, padded", "transformers", _padded(*given)) for name, given in padded.items()]
    return [
        *found,
        Architecture("Whisper", "transformers", _whisper),
        Architecture("wav2vec2", "transformers", _sound("Wav2Vec2ForCTC"), layers="encoder.layers"),
        Architecture("HuBERT", "transformers", _sound("HubertForCTC"), layers="encoder.layers"),
        Architecture("CLIP", "transformers", _clip),
        Architecture("VideoMAE", "transformers", _video),
        *(Architecture(name, "transformers", make) for name, make in IMAGES_AND_TEXTS.items()),
    ]


def architectures() -> dict[str, Architecture]:
    """Return all architectures by name."""
    modules = ("scripts.bench.library_architectures", "scripts.bench.own_architectures")
    others = [each for name in modules for each in importlib.import_module(name).ARCHITECTURES]
    found = [*transformers_architectures(), *others]
    named = {each.name: each for each in found}
    if len(named) < len(found):
        raise ValueError("two architectures have one name")
    return named
