"""Architectures of transformers that run packed, with every gradient, and those that are refused."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import autotuner
from autotuner.errors import InputError
from autotuner.runtime.packing.interface import attention_of
from tests.runtime.test_packing import LENGTHS, padded, without_dropout

TEXT: dict[str, Any] = {"vocab_size": 120, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = TEXT | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
ENCODER = SIZES | {"max_position_embeddings": 128}
GROUPED = ENCODER | {"num_key_value_heads": 2}
FULL = ENCODER | {"num_key_value_heads": 4}
HEADS = GROUPED | {"head_dim": 8}
WINDOWS = HEADS | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = FULL | EXPERTS | {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
PROTEIN = ENCODER | {"mask_token_id": 6, "attention_probs_dropout_prob": 0.0}
GPT = TEXT | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
FALCON = TEXT | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
T5 = {"vocab_size": 120, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "OPT": ("OPTForCausalLM", ENCODER | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "Qwen3": ("Qwen3ForCausalLM", HEADS),
    "OLMo2": ("Olmo2ForCausalLM", GROUPED),
    "OLMo3": ("Olmo3ForCausalLM", WINDOWS),
    "SmolLM3": ("SmolLM3ForCausalLM", GROUPED),
    "Granite": ("GraniteForCausalLM", GROUPED),
    "Starcoder2": ("Starcoder2ForCausalLM", GROUPED | {"sliding_window": 8}),
    "Phi": ("PhiForCausalLM", FULL),
    "Phi-3": ("Phi3ForCausalLM", GROUPED),
    "StableLM": ("StableLmForCausalLM", FULL),
    "GPT-NeoX": ("GPTNeoXForCausalLM", ENCODER),
    "Cohere": ("CohereForCausalLM", GROUPED),
    "Nemotron": ("NemotronForCausalLM", GROUPED),
    "GLM-4": ("Glm4ForCausalLM", HEADS),
    "Gemma": ("GemmaForCausalLM", HEADS),
    "LLaMA, dynamic rotary": (
        "LlamaForCausalLM",
        GROUPED | {"max_position_embeddings": 16,
                   "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "Exaone 4": ("Exaone4ForCausalLM", WINDOWS),
    "XLM-RoBERTa": ("XLMRobertaForMaskedLM", ENCODER),
    "ELECTRA": ("ElectraForMaskedLM", ENCODER | {"embedding_size": 32}),
    "ALBERT": ("AlbertForMaskedLM", ENCODER | {"embedding_size": 16}),
    "ESM": ("EsmForMaskedLM", PROTEIN | {"token_dropout": True}),
    "ESM, rotary": ("EsmForMaskedLM", PROTEIN | {"token_dropout": True, "position_embedding_type": "rotary"}),
    "OLMoE": ("OlmoeForCausalLM", GROUPED | EXPERTS),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", HEADS | EXPERTS),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", LATENT),
    "DeepSeek-V3, wide values": ("DeepseekV3ForCausalLM", LATENT | {"v_head_dim": 24}),
    "GPT-J": ("GPTJForCausalLM", GPT | {"rotary_dim": 4}),
    "CodeGen": ("CodeGenForCausalLM", GPT | {"rotary_dim": 4}),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        TEXT | {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8, "max_position_embeddings": 128,
                "attention_types": [[["global", "local"], 1]]},
    ),
    "GPT-NeoX-Japanese": ("GPTNeoXJapaneseForCausalLM", ENCODER),
    "Falcon": ("FalconForCausalLM", FALCON),
    "Falcon, grouped keys": ("FalconForCausalLM", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon, all keys": ("FalconForCausalLM", FALCON | {"multi_query": False, "parallel_attn": False, "bias": True}),
    "MPT": ("MptForCausalLM", TEXT | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "MPT, six heads, clipped": (
        "MptForCausalLM",
        TEXT | {"d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 64,
                "attn_config": {"clip_qkv": 0.05, "softmax_scale": 0.3}},
    ),
    "MPNet": ("MPNetForMaskedLM", ENCODER | {"pad_token_id": 1, "bos_token_id": 0}),
    "Megatron-BERT": ("MegatronBertForMaskedLM", ENCODER),
    "Megatron-BERT, causal": ("MegatronBertForCausalLM", ENCODER | {"is_decoder": True}),
    "RemBERT": ("RemBertForMaskedLM", ENCODER | {"input_embedding_size": 16, "output_embedding_size": 16}),
    "BERT, causal": ("BertLMHeadModel", ENCODER | {"is_decoder": True}),
}  # fmt: skip
"""Beside those of test_packing and test_packed_bias."""
ROUNDED = {
    "Cohere",
    "Gemma",
    "GPT-J",
    "CodeGen",
    "GPT-Neo",
    "MPT",
    "MPT, six heads, clipped",
    "ESM, rotary",
}
"""Models of float64 that compute a part in float32."""
SINGLE = {"OLMoE", "Qwen3-MoE", "DeepSeek-V3", "DeepSeek-V3, wide values"}
"""Models with experts, whose products torch has in float32 and narrower types alone."""
OWN = ("GPT-J", "Falcon", "MPT", "MPNet", "RemBERT", "ESM")
"""Models with modules of another class when they are packed."""


def of(class_name: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    made = getattr(transformers, class_name)
    return made(made.config_class(**sizes))


def model_of(name: str) -> Any:
    model = without_dropout(of(*WORK[name])).train()
    return model if name in SINGLE else model.double()


def difference(found: Tensor, wanted: Tensor, scale: float = 0.0) -> float:
    """Return the largest difference as a share of the largest number, or of a scale if that is more."""
    return float((found - wanted).detach().abs().max()) / max(float(wanted.detach().abs().max()), scale, 1e-30)


@pytest.mark.parametrize("name", WORK)
def test_tokens_and_every_gradient_are_those_of_the_padded_batch(name: str) -> None:
    model = model_of(name)
    twin, batch = copy.deepcopy(model), padded()
    batch["input_ids"][2, 5:9] = 6  # the token for a mask, where there is one
    there = batch["attention_mask"].bool()
    batch["input_ids"].masked_fill_(~there, model.config.pad_token_id)  # in which ESM counts tokens for a mask
    packer = autotuner.packed(model, tokens=256)  # more than the positions of most
    found, wanted = model(**packer(batch)), twin(**batch)
    tolerance = 2e-5 if name in SINGLE else 5e-6 if name in ROUNDED else 1e-9
    mine, other = packer.unpacked(found.logits, there)[there], wanted.logits[there]
    assert difference(mine, other) < tolerance
    assert difference(found.loss, wanted.loss) < 2e-6
    weights = torch.randn(other.shape, dtype=other.dtype, generator=torch.Generator().manual_seed(0))
    ((mine * weights).sum() + found.loss).backward()
    ((other * weights).sum() + wanted.loss).backward()
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    assert all((one.grad is None) == (two.grad is None) for one, two in pairs)
    gradients = [(one.grad, two.grad) for one, two in pairs if one.grad is not None and two.grad is not None]
    largest = max(float(two.abs().max()) for _, two in gradients)
    assert max(difference(one, two, 1e-5 * largest) for one, two in gradients) < tolerance


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "GPT-OSS": (
        "GptOssForCausalLM", HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "GptOssAttention adds a sink to its scores",
    ),
    "Falcon, ALiBi": ("FalconForCausalLM", FALCON | {"alibi": True}, "Falcon rounds its ALiBi to bfloat16"),
    "DeBERTa-v2": ("DebertaV2ForMaskedLM", ENCODER, "scores of DeBERTa are products with vectors of each distance"),
    "DeBERTa-v3": (
        "DebertaV2ForMaskedLM",
        ENCODER | {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
        "scores of DeBERTa are products with vectors of each distance",
    ),
    "XLNet": (
        "XLNetLMHeadModel", TEXT | {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 64},
        "scores of XLNet are products with vectors of each distance",
    ),
    "Funnel": (
        "FunnelForMaskedLM", {"vocab_size": 120, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64,
                              "block_sizes": [1], "num_decoder_layers": 1},
        "scores of Funnel are products with vectors of each distance",
    ),
    "RoFormer": ("RoFormerForMaskedLM", ENCODER, "RoFormer counts positions from the first token of the batch"),
    "XLM": (
        "XLMWithLMHeadModel", {"vocab_size": 120, "emb_dim": 32, "n_layers": 1, "n_heads": 4},
        "does not let its attention be set, so it cannot run packed: it is code of its own",
    ),
    "MobileBERT": (
        "MobileBertForMaskedLM",
        ENCODER | {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
        "tokens of one sequence change what it makes of another one",
    ),
    "FNet": ("FNetForMaskedLM", SIZES, "its attention does not go through transformers' interface"),
    "BART, causal": (
        "BartForCausalLM",
        TEXT | {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64},
        "of the largest number: it takes no position_ids, so these do not begin anew",
    ),
    "T5": ("T5ForConditionalGeneration", T5, "has attention to an encoder"),
    "BART": (
        "BartForConditionalGeneration",
        TEXT | {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
                "encoder_attention_heads": 4, "decoder_attention_heads": 4},
        "has attention to an encoder",
    ),
    "Mamba": (
        "MambaForCausalLM", TEXT | {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4},
        "packed, attention_mask is for attention alone, and not 1 for tokens and 0 for padding",
    ),
    "LFM2": (
        "Lfm2ForCausalLM", GROUPED | {"layer_types": ["full_attention", "conv"]}, "it has layers of conv",
    ),
    "Llama 4, chunks": (
        "Llama4ForCausalLM", HEADS | {"intermediate_size_mlp": 64, "num_local_experts": 2}, "has layers of chunked_at",
    ),
    "Llama 4, scaled": (
        "Llama4ForCausalLM",
        HEADS | {"intermediate_size_mlp": 64, "num_local_experts": 2, "layer_types": ["full_attention"] * 2,
                 "no_rope_layers": [1, 0]},
        r"it scales queries by their place in a batch \(attn_temperature_tuning\)",
    ),
    "Gemma 3n": (
        "Gemma3nForCausalLM",
        WINDOWS | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 120,
                   "laurel_rank": 8, "activation_sparsity_pattern": None},
        r"what it makes is \[4, 3, 11, 32\] for \[3, 11\] tokens",
    ),
    "Qwen3-Next": (
        "Qwen3NextForCausalLM",
        HEADS | EXPERTS | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8,
                           "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        "it has layers of linear_attention",
    ),
    "Doge": ("DogeForCausalLM", HEADS, "packed, attention_mask is for attention alone"),
    "BigBird": ("BigBirdForMaskedLM", ENCODER, "does not let its attention be set, so it cannot run packed: it is co"),
    "DeepSeek-V3.2": (
        "DeepseekV32ForCausalLM", LATENT | {"index_n_heads": 2, "index_head_dim": 8},
        "packed, attention_mask is for attention alone",
    ),
    "OLMoE, router logits": (
        "OlmoeForCausalLM", GROUPED | EXPERTS | {"output_router_logits": True},
        "its loss that balances experts reads attention_mask as one of padding; set it to False",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_cannot_run_packed_are_refused_by_name_and_stay_as_they_were(name: str) -> None:
    class_name, sizes, words = REFUSED[name]
    model = of(class_name, sizes)
    before, classes = attention_of(model), [type(module) for module in model.modules()]
    with pytest.raises(InputError, match=words) as told:
        autotuner.packed(model)
    assert class_name in str(told.value) or "Attention" in str(told.value)
    assert attention_of(model) == before
    assert [type(module) for module in model.modules()] == classes
    assert not any(hook.__module__.startswith("autotuner") for each in model.modules()
                   for hook in each._forward_pre_hooks.values())  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_models_with_classes_of_their_own_take_padded_batches_and_go_back(name: str, tmp_path: Path) -> None:
    model, batch = model_of(name).eval(), padded()
    twin, before = copy.deepcopy(model), attention_of(model)
    packer = autotuner.packed(autotuner.packed(model) and model)
    assert torch.equal(model(**batch).loss, twin(**batch).loss)
    other = copy.deepcopy(model)
    assert torch.equal(other(**packer(batch)).loss, model(**packer(batch)).loss)
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).config.architectures == [type(twin).__name__]
    autotuner.api.packing.unpacked_again(model, before)
    assert [type(module) for module in model.modules()] == [type(module) for module in twin.modules()]
    assert not any(hook.__module__.startswith("autotuner") for each in model.modules()
                   for hook in each._forward_pre_hooks.values())  # fmt: skip


def test_a_model_without_a_head_is_saved_under_its_name(tmp_path: Path) -> None:
    model = of("MptModel", WORK["MPT"][1])
    autotuner.packed(model)
    model.save_pretrained(tmp_path)
    assert type(model).__name__ == "MptModel"
    assert transformers.MptModel.from_pretrained(tmp_path).config.architectures == ["MptModel"]
    again = pickle.loads(pickle.dumps(model))
    assert attention_of(again) == {"": "autotuner_packed"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MPT", "MPNet"])
def test_models_are_compiled_as_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model = model_of(name)
    tokens = autotuner.packed(model, tokens=256)(padded())
    compiled: Any = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**tokens).loss, model(**tokens).loss, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["GPT-J", "Falcon", "MPT", "MPNet", "RemBERT"])
def test_weights_are_dropped_as_in_the_padded_model(name: str) -> None:
    class_name, sizes = WORK[name]
    share: dict[str, dict[str, Any]] = {
        "GPT-J": {"attn_pdrop": 0.5, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, "MPT": {"attn_config": {"attn_pdrop": 0}},
        "Falcon": {"attention_dropout": 0.5},  # which transformers does not apply beside rotary positions
    }  # fmt: skip
    model = of(class_name, sizes | share.get(name, {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.0}))
    for module in model.modules():
        if name == "MPT" and hasattr(module, "attn_dropout_p"):
            module.attn_dropout_p = 0.5
    tokens = autotuner.packed(model)(padded())
    model.train()
    drawn = [float(model(**tokens).loss.detach()) for _ in range(3)]
    assert len(set(drawn)) == (1 if name == "Falcon" else 3)
    model.eval()
    assert drawn == pytest.approx([float(model(**tokens).loss.detach())] * 3, abs=0.3)


def flattened() -> tuple[Tensor, Tensor]:
    """Return the tokens of a padded batch in one row, and their positions."""
    batch = padded()
    ids = batch["input_ids"][batch["attention_mask"].bool()]
    return ids[None], torch.cat([torch.arange(length) for length in LENGTHS])[None]


def test_flattened_batches_are_packed_where_arguments_come_by_place_or_the_inner_model_is_called() -> None:
    model = of("LlamaForCausalLM", GROUPED).double().eval()
    batch, (ids, positions) = padded(), flattened()
    there = batch.pop("attention_mask").bool()
    wanted = model(input_ids=batch["input_ids"], attention_mask=there.long(), output_hidden_states=True)
    autotuner.packed(model)
    for found in (model(ids, position_ids=positions), model(ids, None, positions)):
        assert difference(found.logits[0], wanted.logits[there]) < 1e-9
    inner = model.model(input_ids=ids, position_ids=positions).last_hidden_state
    assert difference(inner[0], wanted.hidden_states[-1][there]) < 1e-9


def test_states_of_an_encoder_and_losses_that_read_a_mask_of_padding_are_refused_in_a_call() -> None:
    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    model = of("WhisperForCausalLM", TEXT | sizes)
    tokens = autotuner.packed(model)(padded())
    assert model(**tokens).loss.isfinite()
    with pytest.raises(InputError, match="WhisperForCausalLM is given packed tokens and encoder_outputs: each sequen"):
        model(**tokens, encoder_outputs=(torch.zeros(1, 7, 32),))
    model = of("OlmoeForCausalLM", GROUPED | EXPERTS)
    tokens = autotuner.packed(model)(padded())
    with pytest.raises(InputError, match="OlmoeForCausalLM is given packed tokens and output_router_logits: its loss"):
        model(**tokens, output_router_logits=True)


class OtherMask(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Has a first layer that is given no mask, and whose output comes to nothing."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        first = self.model.layers[0].self_attn
        torch.nn.init.zeros_(first.o_proj.weight)
        first.register_forward_pre_hook(lambda _, given, named: (given, named | {"attention_mask": None}),
                                        with_kwargs=True)  # fmt: skip


def test_a_layer_that_gets_another_mask_is_refused() -> None:
    with pytest.raises(InputError, match="LlamaAttention gets another mask than that of the batch"):
        autotuner.packed(OtherMask(transformers.LlamaConfig(**GROUPED)))


def test_a_padded_batch_that_is_not_finite_is_nothing_to_compare_with() -> None:
    model = of("LlamaForCausalLM", GROUPED)
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with pytest.raises(InputError, match="what it makes of a padded batch is not finite"):
        autotuner.packed(model)


def test_embeddings_that_do_not_get_the_mask_of_a_batch_are_refused() -> None:
    model = model_of("ESM")  # as in transformers 5.0

    def without_mask(_: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        return arguments, {**keywords, "attention_mask": None}

    model.esm.embeddings.register_forward_pre_hook(without_mask, with_kwargs=True)
    with pytest.raises(InputError, match="what it makes of tokens differs"):
        autotuner.packed(model, tokens=256)
