"""Cases of attention over packed tokens, and how far programs are from dense attention with the same mask."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotuner.kernels.rules.attention_triton import kept_levels
from autotuner.kernels.rules.packed_tiles import TILED, PackedTiles, default_tiles
from autotuner.kernels.torch.packed_attention import kept_weights
from autotuner.kernels.triton import packed_attention
from autotuner.runtime.packing.bounds import bounds_of, narrowed, seers_of
from tests.kernels.packed_operators import SPACE

HEADS = 2
"""Of queries."""


@dataclass(frozen=True)
class Case:
    """Attention over some sequences.

    Args:
        lengths: of the sequences.
        shared: heads of keys and values, of two heads of queries.
        features: of a head.
        before, behind: so many tokens are seen at most; None for all.
        p: the share of the weights that is dropped.
        cap: of the scores.
        reach: of a relative bias; None without one.
    """

    lengths: tuple[int, ...] = (5, 1, 70, 20)
    shared: int = HEADS
    features: int = 16
    before: int | None = None
    behind: int | None = None
    p: float = 0.0
    cap: float = 0.0
    reach: int | None = None

    @property
    def factor(self) -> float:
        """Of the scores."""
        return float(self.features**-0.5)


CASES = {
    "both directions": Case(),
    "whole tiles": Case((64, 1, 63)),
    "causal": Case(behind=0),
    "causal, dropout": Case(behind=0, p=0.25),
    "dropout": Case(p=0.25),
    "window": Case((90, 6), before=9, behind=9),
    "causal window": Case((90, 6), before=9, behind=0),
    "heads that share a key": Case(shared=1, behind=0, p=0.25),
    "features that are no power of 2": Case(features=24, p=0.25),
    "cap": Case(cap=1.5, behind=0),
    "sequences of one token": Case((1,) * 40),
    "bias of all distances": Case(reach=99),
    "bias, causal, dropout, heads that share a key": Case(shared=1, behind=0, p=0.25, reach=40),
    "bias that ends near": Case((200, 1, 9), cap=1.5, reach=32),
    "bias of one number": Case(reach=0, p=0.25),
    "bias in a window": Case((90, 6), before=9, behind=9, reach=3),
    "bias of sequences of one token": Case((1,) * 40, reach=5),
}
SEED = 1234567
MANY = (0, 5, 1, 150, 0, 33)
"""Lengths of which two are empty, and one longer than the largest tile."""
TILED_CASES = {
    "causal, dropout, heads that share a key": Case(MANY, shared=1, behind=0, p=0.25),
    "dropout, bias": Case(MANY, p=0.25, reach=40),
    "both directions": Case(MANY),
}
"""Cases of every tile that a search space has."""


def tried_tiles(case: Case, dtype: torch.dtype) -> list[PackedTiles]:
    """Return tiles in which each program has each of those that a CUDA device's search space tries."""
    default = default_tiles(case.features, dtype.itemsize, drops=case.p > 0, biased=case.reach is not None)
    tried = {
        program: [default.chosen(kind, {name: text}) for text in SPACE.kernels[f"triton_{kind}"].params[name]]
        for kind, programs in TILED.items()
        for name, program in programs.items()
    }
    return [
        PackedTiles(**{program: getattr(own[number % len(own)], program) for program, own in tried.items()})
        for number in range(max(map(len, tried.values())))
    ]


def operands(case: Case, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return query, key, value and a gradient, whose heads lie beside each other in a row; bounds; a seed."""
    torch.manual_seed(0)
    positions = torch.cat([torch.arange(length) for length in case.lengths])
    made = [
        torch.randn(len(positions), heads, case.features).to(device, dtype).transpose(0, 1)
        for heads in (HEADS, case.shared, case.shared, HEADS)
    ]
    bounds = narrowed(bounds_of(positions), case.before, case.behind).to(device)
    return made, bounds, torch.tensor([SEED], device=device)


def relative_bias(case: Case, device: str) -> Tensor | None:
    """Return a bias, whose distances are outermost in memory."""
    if case.reach is None:
        return None
    return torch.randn(2 * case.reach + 1, HEADS, generator=torch.Generator().manual_seed(1)).to(device).T


def added(case: Case, bias: Tensor, count: int) -> Tensor:
    """Return what a bias adds to scores, (heads, rows, keys)."""
    place = torch.arange(count, device=bias.device)
    assert case.reach is not None
    return bias[:, (place[None] - place[:, None]).clamp(-case.reach, case.reach) + case.reach]


def kept(case: Case, bounds: Tensor, like: Tensor, seed: Tensor) -> Tensor:
    """Return which weights are kept, (heads, rows, keys), read off results: scores are equal, values unit vectors."""
    heads, rows, features = like.shape
    zeros = torch.zeros_like(like)
    parts = []
    for first in range(0, rows, features):
        units = torch.zeros(rows, features, dtype=like.dtype, device=like.device)
        width = min(features, rows - first)
        units[first : first + width, :width] = torch.eye(width)
        values = units.expand(heads, rows, features)
        out, _ = packed_attention.forward(zeros, zeros, values, bounds, seed, case.factor, case.p, 0.0)
        parts.append(out[..., :width] != 0)
    return torch.cat(parts, -1)


def drawn(case: Case, bounds: Tensor, seed: Tensor) -> Tensor:
    """Return which weights are kept, as torch's operators draw them."""
    everything = slice(0, len(bounds))
    return kept_weights(seed, HEADS, everything, everything, len(bounds), kept_levels(case.p))


def masks_differ(case: Case, device: str) -> int:
    """Return of how many weights that are seen the programs and torch's operators decide otherwise."""
    (query, *_), bounds, seed = operands(case, torch.float32, device)
    by_torch = drawn(case, bounds, seed)
    place = torch.arange(len(bounds), device=device)
    seen = (place >= bounds[:, :1]) & (place < bounds[:, 1:])
    return int((by_torch != kept(case, bounds, query, seed))[:, seen].sum())


def errors(case: Case, dtype: torch.dtype, device: str, tiles: PackedTiles | None = None) -> dict[str, float]:
    """Return the largest errors of the output and the gradients, as shares of the largest value, against float64.

    A bias that is the same everywhere changes nothing, and its gradient is 0 but for rounding: its errors are shares of
    the root of the squares of what is added up.

    Args:
        tiles: those by default where it is None.
    """
    (query, key, value, gradient), bounds, seed = operands(case, dtype, device)
    bias = relative_bias(case, device)
    numbers = (case.factor, case.p, case.cap)
    out, log_sum_exp = packed_attention.forward(query, key, value, bounds, seed, *numbers, bias, tiles=tiles)
    given = (gradient, query, key, value, out, log_sum_exp)
    options: dict[str, Any] = {"bounds": bounds, "seed": seed, "factor": case.factor, "p": case.p, "cap": case.cap}
    options["tiles"] = tiles
    found = list(packed_attention.backward(*given, **options, seers=seers_of(bounds), bias=bias))
    if bias is not None:
        found.append(packed_attention.bias_gradient(*given, **options, bias=bias))
    place = torch.arange(len(bounds), device=device)
    seen = (place >= bounds[:, :1]) & (place < bounds[:, 1:])
    wide = [each.double().requires_grad_() for each in (query, key, value)]
    scores = case.factor * wide[0] @ wide[1].repeat_interleave(HEADS // case.shared, 0).transpose(1, 2)
    if case.cap:
        scores = case.cap * torch.tanh(scores / case.cap)
    if bias is not None:
        wide.append(bias.double().requires_grad_())
        scores = scores + added(case, wide[-1], len(bounds))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    if case.p:
        mask = drawn(case, bounds, seed)
        share = float(mask[:, seen].double().mean())
        assert abs(share - (1 - case.p)) < 0.05, share
        assert not torch.equal(mask[0], mask[1])
        weights = weights * mask / (1 - case.p)
    wanted = weights @ wide[2].repeat_interleave(HEADS // case.shared, 0)
    of_inputs = torch.autograd.grad(wanted, wide, gradient.double(), retain_graph=True)
    names = ("out", "query", "key", "value", "bias")[: len(found) + 1]
    sizes = {name: other.abs().max().clamp(min=1.0) for name, other in zip(names, (wanted, *of_inputs), strict=True)}
    if case.reach == 0:
        (of_scores,) = torch.autograd.grad(wanted, scores, gradient.double(), retain_graph=True)
        (squares,) = torch.autograd.grad(scores, wide[-1], of_scores.square())
        sizes["bias"] = torch.maximum(sizes["bias"], squares.max().sqrt())
    return {
        name: float((mine.double() - other).abs().max() / sizes[name])
        for name, mine, other in zip(names, (out, *found), (wanted, *of_inputs), strict=True)
    }
