"""Architectures of torch.nn, timm, x-transformers, diffusers and torchvision for scripts/coverage."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scripts.bench.architectures import (
    CLASSES,
    HEADS,
    IMAGE,
    INNER,
    LAYERS,
    LENGTH,
    PATCH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Architecture,
    Made,
    features,
    images,
    token_ids,
)

Sizes = dict[str, Any]
TIMM_VIT = {"img_size": IMAGE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": LAYERS, "num_heads": HEADS,
            "num_classes": CLASSES}  # fmt: skip

TIMM: dict[str, tuple[str, Sizes]] = {
    "ViT (timm)": ("vision_transformer:vit_base_patch16_224", TIMM_VIT),
    "DeiT3 (timm)": ("deit:deit3_base_patch16_224", TIMM_VIT),
    "SigLIP (timm)": ("vision_transformer:vit_base_patch16_siglip_224", TIMM_VIT),
    "BEiT (timm)": ("beit:beit_base_patch16_224", TIMM_VIT),
    "EVA02 (timm)": ("eva:eva02_base_patch14_224", TIMM_VIT),
    "CaiT (timm)": ("cait:cait_s24_224", TIMM_VIT | {"depth_token_only": 2}),
    "XCiT (timm)": ("xcit:xcit_small_12_p16_224", TIMM_VIT | {"patch_size": 16}),
    "Swin (timm)": ("swin_transformer:swin_tiny_patch4_window7_224", {"img_size": 32, "embed_dim": 32, "depths": (2, 2),
                    "num_heads": (2, 4), "window_size": 4, "num_classes": CLASSES}),
    "Swin V2 (timm)": ("swin_transformer_v2:swinv2_tiny_window8_256", {"img_size": 32, "embed_dim": 32,
                       "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "num_classes": CLASSES}),
    "LeViT (timm)": ("levit:levit_128", {"img_size": 64, "embed_dim": (32, 48), "depth": (2, 2), "num_heads": (2, 3),
                     "key_dim": 16, "num_classes": CLASSES}),
    "MLP-Mixer (timm)": ("mlp_mixer:_create_mixer", {"variant": "mixer_b16_224", "img_size": IMAGE, "patch_size": PATCH,
                         "embed_dim": WIDTH, "num_blocks": LAYERS, "num_classes": CLASSES}),
    "ConvNeXt (timm)": ("convnext:convnext_tiny", {"depths": (1, 1, 2, 1), "dims": (16, 32, 48, 64),
                        "num_classes": CLASSES}),
}  # fmt: skip

DECODER: dict[str, Sizes] = {
    "decoder": {},
    "decoder, flash": {"attn_flash": True},
    "decoder, rotary, SwiGLU, RMS norm": {"rotary_pos_emb": True, "ff_swish": True, "ff_glu": True,
                                          "use_rmsnorm": True},
    "decoder, ALiBi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "decoder, relative bias of T5": {"rel_pos_bias": True},
    "decoder, norms of queries and keys": {"attn_qk_norm": True},
    "decoder, grouped keys": {"attn_kv_heads": 2},
    "decoder, squared ReLU": {"ff_relu_squared": True},
    "decoder, sandwich norms": {"sandwich_norm": True},
}  # fmt: skip


def _timm(entry: str, sizes: Sizes) -> Callable[[], Made]:
    module, name = entry.split(":")

    def make() -> Made:
        made = getattr(importlib.import_module(f"timm.models.{module}"), name)(pretrained=False, **sizes)
        return made, (images(sizes.get("img_size", 64)),)

    return make


class _WithLoss(nn.Module):
    """A model of tokens with the loss of the next one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor) -> Any:
        return nn.functional.cross_entropy(self.net(ids).flatten(0, 1), ids.flatten())


def _x_transformers(layers: str, given: Sizes) -> Callable[[], Made]:
    def make() -> Made:
        x_transformers = importlib.import_module("x_transformers")
        stack = getattr(x_transformers, layers)(dim=WIDTH, depth=LAYERS, heads=HEADS, attn_dim_head=16, **given)
        model = x_transformers.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=stack)
        return _WithLoss(model), (token_ids(),)

    return make


def _x_vit() -> Made:
    x_transformers = importlib.import_module("x_transformers")
    stack = x_transformers.Encoder(dim=WIDTH, depth=LAYERS, heads=HEADS, attn_dim_head=16)
    model = x_transformers.ViTransformerWrapper(
        image_size=IMAGE, patch_size=PATCH, num_classes=CLASSES, attn_layers=stack
    )
    return model, (images(),)


def _diffusers(name: str, sizes: Sizes, batch: Callable[[], Sizes]) -> Callable[[], Made]:
    def make() -> Made:
        return getattr(importlib.import_module("diffusers"), name)(**sizes), {**batch(), "return_dict": False}

    return make


NOISE = {"num_attention_heads": HEADS, "attention_head_dim": 16, "num_layers": LAYERS}
TIMES = torch.tensor([10, 500])
DIFFUSION: dict[str, tuple[str, Sizes, Callable[[], Sizes]]] = {
    "DiT (diffusers)": (
        "DiTTransformer2DModel", NOISE | {"sample_size": 8, "norm_num_groups": 4},
        lambda: {"hidden_states": features(ROWS, 4, 8, 8), "timestep": TIMES, "class_labels": torch.tensor([1, 3])},
    ),
    "PixArt (diffusers)": (
        "PixArtTransformer2DModel", NOISE | {"sample_size": 8, "norm_num_groups": 4, "cross_attention_dim": WIDTH,
        "caption_channels": 32, "use_additional_conditions": False},
        lambda: {"hidden_states": features(ROWS, 4, 8, 8), "encoder_hidden_states": features(ROWS, 6, 32),
                 "timestep": TIMES, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "Stable Diffusion 3 (diffusers)": (
        "SD3Transformer2DModel", NOISE | {"sample_size": 8, "in_channels": 4, "out_channels": 4,
        "joint_attention_dim": 32, "caption_projection_dim": WIDTH, "pooled_projection_dim": 32,
        "pos_embed_max_size": 8},
        lambda: {"hidden_states": features(ROWS, 4, 8, 8), "encoder_hidden_states": features(ROWS, 6, 32),
                 "pooled_projections": features(ROWS, 32), "timestep": TIMES},
    ),
    "Flux (diffusers)": (
        "FluxTransformer2DModel", NOISE | {"in_channels": 16, "num_layers": 2, "num_single_layers": 2,
        "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6)},
        lambda: {"hidden_states": features(ROWS, 16, 16), "encoder_hidden_states": features(ROWS, 6, 32),
                 "pooled_projections": features(ROWS, 32), "timestep": torch.tensor([0.1, 0.5]),
                 "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)},
    ),
    "U-Net with cross-attention (diffusers)": (
        "UNet2DConditionModel", {"sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1,
        "block_out_channels": (32, 64), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 32, "attention_head_dim": 4,
        "norm_num_groups": 8},
        lambda: {"sample": features(ROWS, 4, 16, 16), "timestep": TIMES,
                 "encoder_hidden_states": features(ROWS, 6, 32)},
    ),
}  # fmt: skip


def _torchvision(name: str) -> Callable[[], Made]:
    def make() -> Made:
        if name == "vit":
            vit = importlib.import_module("torchvision.models.vision_transformer")
            return vit.VisionTransformer(IMAGE, PATCH, LAYERS, HEADS, WIDTH, INNER, num_classes=CLASSES), (images(),)
        swin = importlib.import_module("torchvision.models.swin_transformer")
        blocks = {"swin": (swin.SwinTransformerBlock, swin.PatchMerging),
                  "swin v2": (swin.SwinTransformerBlockV2, swin.PatchMergingV2)}  # fmt: skip
        block, merging = blocks[name]
        model = swin.SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=CLASSES, block=block,
                                     downsample_layer=merging)  # fmt: skip
        return model, (images(IMAGE),)

    return make


def _encoder(**given: Any) -> Callable[[], Made]:
    def make() -> Made:
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, **given)
        shape = (ROWS, LENGTH, WIDTH) if given.get("batch_first") else (LENGTH, ROWS, WIDTH)
        return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False), (features(*shape),)

    return make


def _transformer() -> Made:
    model = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, INNER)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    given = {"tgt_mask": mask, "tgt_is_causal": True}
    return model, {"src": features(12, ROWS, WIDTH), "tgt": features(LENGTH, ROWS, WIDTH), **given}


ARCHITECTURES = [
    Architecture("nn.TransformerEncoder", "torch.nn", _encoder(), needs="torch"),
    Architecture("nn.TransformerEncoder, norms first, GELU, batch first", "torch.nn",
                 _encoder(norm_first=True, activation="gelu", batch_first=True), needs="torch"),
    Architecture("nn.Transformer", "torch.nn", _transformer, needs="torch"),
    *(Architecture(name, "timm", _timm(*given)) for name, given in TIMM.items()),
    *(Architecture(f"x-transformers {name}", "x-transformers", _x_transformers("Decoder", given),
                   needs="x_transformers") for name, given in DECODER.items()),
    Architecture("x-transformers encoder", "x-transformers", _x_transformers("Encoder", {}), needs="x_transformers"),
    Architecture("x-transformers ViT", "x-transformers", _x_vit, needs="x_transformers"),
    *(Architecture(name, "diffusers", _diffusers(*given)) for name, given in DIFFUSION.items()),
    Architecture("ViT (torchvision)", "torchvision", _torchvision("vit")),
    Architecture("Swin (torchvision)", "torchvision", _torchvision("swin")),
    Architecture("Swin V2 (torchvision)", "torchvision", _torchvision("swin v2")),
]  # fmt: skip
