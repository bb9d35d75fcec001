"""All classes of transformers that have a loss of text or of an image's class, in small, for scripts/coverage.

A configuration has the values that it has by default, but for sizes, which are known by their names: some hundred
names stand for what a size can be. Where the values that come out do not go together, the row says so.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from scripts.bench.architectures import SPECIAL, Architecture, Made, images, token_ids

LAYERS = 4
_SIZES = {
    64: "vocab_size text_vocab_size vocab_size_per_layer_input hidden_size d_model n_embd dim embedding_size "
    "embed_dim emb_dim word_embed_proj_dim encoder_hidden_size lru_width mamba_d_ssm attention_hidden_size "
    "cross_attention_hidden_size block_dim max_position_embeddings n_positions max_seq_len n_ctx "
    "max_source_positions max_target_positions seq_length",
    128: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner hidden_dim d_inner inner_size "
    "shared_intermediate_size ffn_hidden_size decoder_intermediate_size intermediate_size_mlp "
    "dense_intermediate_size",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts linear_num_value_heads index_n_heads",
    2: "num_key_value_heads num_kv_heads n_head_kv num_experts_per_tok moe_k num_selected_experts top_k_experts "
    "moe_topk moe_top_k linear_num_key_heads",
    16: "head_dim d_kv attention_head_dim global_head_dim kv_channels linear_key_head_dim linear_value_head_dim "
    "index_head_dim kv_lora_rank v_head_dim mamba_head_dim mamba_d_head",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_intermediate_size q_lora_rank "
    "expert_ffn_hidden_size moe_shared_expert_intermediate_size image_size",
    8: "qk_rope_head_dim qk_nope_head_dim rotary_dim hidden_size_per_layer_input mamba_d_state state_size "
    "ssm_state_size mamba_dt_rank time_step_rank mamba_num_heads mamba_n_heads sliding_window "
    "attention_window_size index_topk patch_size",
    1: "n_group topk_group n_groups mamba_n_groups first_k_dense_replace",
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "swin": {"image_size": 64, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    "swinv2": {"image_size": 64, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
}
"""Values of model types whose sizes follow from their names alone in none that works."""
SIZES = {name: size for size, names in _SIZES.items() for name in names.split()}


def shrunk(config_class: Any) -> dict[str, Any]:
    """Return the values with which a configuration is small, and all others are as they are by default."""
    made = config_class()
    found: dict[str, Any] = {}
    for name, value in made.to_dict().items():
        part = getattr(config_class, "sub_configs", {}).get(name)
        if name in SIZES and isinstance(value, int):
            found[name] = SIZES[name]
        elif name == "layer_types" and value:
            kinds = sorted({*value, "full_attention"} if set(value) == {"linear_attention"} else {*value})
            found[name] = [kinds[place % len(kinds)] for place in range(LAYERS)]
        elif part is not None and isinstance(value, dict):
            found[name] = shrunk(type(getattr(made, name)))
    if "qk_rope_head_dim" in found:
        found.pop("head_dim", None)  # it follows from both parts
    return found


def _made(kind: str, name: str, batch: Callable[[Any], Mapping[str, Any]], **given: Any) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        config_class = transformers.CONFIG_MAPPING[kind]
        config = config_class(**shrunk(config_class) | given | OWN.get(kind, {}))
        if name.endswith(("CausalLM", "LMHeadModel")) and getattr(config, "is_decoder", None) is False:
            config.is_decoder = True
        return getattr(transformers, name)(config), batch(config)

    return make


def _of_text(_: Any) -> Mapping[str, Any]:
    ids = token_ids()
    return {"input_ids": ids, "labels": ids}


def _of_image(config: Any) -> Mapping[str, Any]:
    size = getattr(config, "image_size", 64)
    extent = size if isinstance(size, int) else size[0]
    return {"pixel_values": images(extent, getattr(config, "num_channels", 3)), "labels": torch.tensor([0, 1])}


def classes() -> dict[str, Architecture]:
    """Return an architecture for each class of transformers' for these tasks, by its name."""
    from transformers.models.auto import modeling_auto as auto

    of_text = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    found: dict[str, Architecture] = {}
    for mapping, batch, given in (
        *((each, _of_text, SPECIAL) for each in of_text),
        (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, _of_image, {}),
    ):
        for kind, names in mapping.items():
            name = names if isinstance(names, str) else names[0]
            if name not in found or kind.replace("_", "").replace("-", "") in name.lower():
                found[name] = Architecture(name, kind, _made(kind, name, batch, **given), needs="transformers")
    return found
