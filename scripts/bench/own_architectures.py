"""Architectures of own code for scripts/coverage: models as people write them, in the style of well-known ones."""

import importlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from scripts.bench.architectures import (
    CLASSES,
    HEADS,
    IMAGE,
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


class Norm(nn.Module):
    """A layer norm whose bias may be left out."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalAttention(nn.Module):
    """Attention with one stacked projection, split after it."""

    def __init__(self, bias: bool, dropout: float) -> None:
        super().__init__()
        self.stacked = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.dropout = dropout
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:
        rows, length, width = x.size()
        query, key, value = self.stacked(x).split(width, dim=2)
        query, key, value = (y.view(rows, length, HEADS, width // HEADS).transpose(1, 2) for y in (query, key, value))
        p = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
        return self.residual_dropout(self.out(seen.transpose(1, 2).contiguous().view(rows, length, width)))


class FeedForward(nn.Module):
    def __init__(self, bias: bool, dropout: float) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(WIDTH, 4 * WIDTH, bias=bias), nn.GELU()
        self.down, self.dropout = nn.Linear(4 * WIDTH, WIDTH, bias=bias), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:
        return self.dropout(self.down(self.act(self.up(x))))


class Block(nn.Module):
    def __init__(self, bias: bool, dropout: float, parallel: bool = False) -> None:
        super().__init__()
        self.norm_1, self.attention = Norm(WIDTH, bias), CausalAttention(bias, dropout)
        self.norm_2, self.mlp = Norm(WIDTH, bias), FeedForward(bias, dropout)
        self.parallel = parallel

    def forward(self, x: Tensor) -> Any:
        if self.parallel:
            return x + self.attention(self.norm_1(x)) + self.mlp(self.norm_2(x))
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class TinyGPT(nn.Module):
    """A GPT with learned positions, and a head that shares its weight with the embedding."""

    def __init__(
        self, bias: bool = False, dropout: float = 0.0, block: type[nn.Module] | None = None, **given: Any
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        made = block or Block
        self.h = nn.ModuleList(made(bias=bias, dropout=dropout, **given) for _ in range(LAYERS))
        self.norm, self.head = Norm(WIDTH, bias), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(0, ids.size(1), dtype=torch.long, device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        for block in self.h:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class WrittenOutAttention(nn.Module):
    """Attention in products and a softmax, with a mask from a buffer, a soft cap, and rotary halves."""

    mask: Tensor
    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.value, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))
        frequencies = 1.0 / 10000 ** (torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
        self.register_buffer("angles", torch.arange(LENGTH)[:, None] * frequencies[None])

    def turned(self, x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        cosine, sine = self.angles.cos().to(x.dtype), self.angles.sin().to(x.dtype)
        return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)

    def forward(self, x: Tensor) -> Any:
        rows, length, width = x.shape
        query, key, value = (
            each(x).view(rows, length, HEADS, -1).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        scores = self.turned(query) @ self.turned(key).transpose(-2, -1) / math.sqrt(width // HEADS)
        scores = 30.0 * torch.tanh(scores / 30.0)
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        seen = functional.softmax(scores, dim=-1) @ value
        return self.out(seen.transpose(1, 2).reshape(rows, length, width))


class SquaredReLUBlock(nn.Module):
    """A block of speed runs: RMS norms without weights, squared ReLU, learned scales of the residuals."""

    def __init__(self, bias: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        del bias, dropout
        self.attention = WrittenOutAttention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.scales = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        x = self.scales[0] * x + self.attention(functional.rms_norm(x, (x.size(-1),)))
        y = functional.relu(self.up(functional.rms_norm(x, (x.size(-1),)))).square()
        return x + self.scales[1] * self.down(y)


class Routed(nn.Module):
    """Experts of which each token takes two, in a loop over experts with a dense mask."""

    def __init__(self, bias: bool = False, dropout: float = 0.0, experts: int = 4) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.RMSNorm(WIDTH), CausalAttention(bias, dropout)
        self.norm_2, self.gate = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) * 0.02)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm_1(x))
        y = self.norm_2(x)
        weights, chosen = self.gate(y).softmax(-1).topk(2, dim=-1)
        weights = torch.zeros_like(self.gate(y)).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        made = torch.einsum("blh,ehf->blef", y, self.up)
        made = torch.einsum("blef,efh->bleh", functional.silu(made), self.down)
        return x + (made * weights.unsqueeze(-1)).sum(2)


class ModulatedBlock(nn.Module):
    """A block of a diffusion transformer: norms without weights, shifted, scaled and gated by a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.norm_2 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.stacked, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, condition: Tensor) -> Any:
        given = self.modulation(condition).chunk(6, dim=1)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (each.unsqueeze(1) for each in given)
        y = self.norm_1(x) * (1 + scale_1) + shift_1
        rows, length, width = y.shape
        query, key, value = self.stacked(y).reshape(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value)
        x = x + gate_1 * self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + gate_2 * self.mlp(self.norm_2(x) * (1 + scale_2) + shift_2)


class TinyDiT(nn.Module):
    """A diffusion transformer on patches of a latent image, conditioned on a class and a time."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, WIDTH, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, 64, WIDTH) * 0.02)
        self.classes, self.time = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ModulatedBlock() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Any:
        y = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        angles = time[:, None] * torch.exp(-torch.arange(WIDTH // 2) / 8).to(x.dtype)
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1)) + self.classes(label)
        for block in self.blocks:
            y = block(y, condition)
        return self.head(self.norm(y))


class SplitHeadsAttention(nn.Module):
    """Attention of vision models as einops writes it: `b n (h d) -> b h n d`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.stacked, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        rearrange = importlib.import_module("einops").rearrange
        query, key, value = (
            rearrange(each, "b n (h d) -> b h n d", h=HEADS) for each in self.stacked(self.norm(x)).chunk(3, dim=-1)
        )
        attention = (query @ key.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5).softmax(dim=-1)
        return x + self.out(rearrange(attention @ value, "b h n d -> b n (h d)"))


class TinyViT(nn.Module):
    """A vision transformer in einops' style."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.layers = nn.ModuleList(
            nn.ModuleList([
                SplitHeadsAttention(),
                nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)),
            ])
            for _ in range(LAYERS)
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        y = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            attention, mlp = layer  # type: ignore[misc]
            y = attention(y)  # type: ignore[has-type]
            y = y + mlp(y)  # type: ignore[has-type]
        return self.head(y.mean(1))


class Mixer(nn.Module):
    """Layers that mix tokens and then channels, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "norm_1": nn.LayerNorm(WIDTH),
                "tokens": nn.Sequential(nn.Linear(LENGTH, 32), nn.GELU(), nn.Linear(32, LENGTH)),
                "norm_2": nn.LayerNorm(WIDTH),
                "channels": nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)),
            })
            for _ in range(LAYERS)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = x + layer["tokens"](layer["norm_1"](x).transpose(1, 2)).transpose(1, 2)  # type: ignore[index]
            x = x + layer["channels"](layer["norm_2"](x))  # type: ignore[index]
        return x


def _gpt(**given: Any) -> Made:
    ids = token_ids()
    return TinyGPT(**given), (ids, ids)


ARCHITECTURES = [
    Architecture("nanoGPT's style, no biases", "own code", lambda: _gpt()),
    Architecture("nanoGPT's style, biases, dropout 0.1", "own code", lambda: _gpt(bias=True, dropout=0.1)),
    Architecture("GPT, parallel branches", "own code", lambda: _gpt(parallel=True)),
    Architecture("GPT, squared ReLU, soft cap, interleaved rotary", "own code", lambda: _gpt(block=SquaredReLUBlock)),
    Architecture("GPT, routed experts by einsum", "own code", lambda: _gpt(block=Routed)),
    Architecture(
        "DiT, own code", "own code",
        lambda: (TinyDiT(), (features(ROWS, 4, 16, 16), torch.tensor([0.1, 0.7]), torch.tensor([1, 3]))),
    ),
    Architecture("ViT in einops' style", "own code", lambda: (TinyViT(), (images(IMAGE),)), needs="einops"),
    Architecture("MLP-Mixer, own code", "own code", lambda: (Mixer(), (features(ROWS, LENGTH, WIDTH),))),
]  # fmt: skip
