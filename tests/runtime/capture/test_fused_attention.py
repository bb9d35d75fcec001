"""Attention as models declare and write it is one kernel on a CUDA device, forward and backward."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autotuner.api.survey import region_calls
from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph
from autotuner.ir.records import Candidate
from autotuner.kernels import KERNELS
from autotuner.space.fusion import covers
from tests.runtime.capture.known import Compilation, assert_equal, gradients
from tests.runtime.capture.test_default_configurations import SMALL, tokens

FORWARD = (("rows", 64), ("columns", 64), ("warps", 4), ("stages", 2))
BACKWARD = (
    ("query_rows", 64), ("query_columns", 64), ("query_warps", 4), ("key_rows", 64), ("key_columns", 64),
    ("key_warps", 4), ("stages", 2),
)  # fmt: skip
WHOLE = {name: size for name, size in SMALL.items() if name != "num_key_value_heads"}


class ByEinsum(nn.Module):
    """Attention as libraries of views write it: products by einsum, later keys hidden by a fill."""

    def __init__(self, *, alibi: bool = False) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32)
        slopes = torch.tensor([0.5, 0.25])[:, None, None] if alibi else None
        self.register_buffer("slopes", slopes)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        query, key, value = (each(x).unflatten(-1, (-1, 16)).transpose(1, 2)
                             for each in (self.query, self.key, self.value))  # fmt: skip
        scores = torch.einsum("b h i d, b h j d -> b h i j", query, key) * 0.25
        if isinstance(self.slopes, Tensor):
            places = torch.arange(length, device=x.device)
            scores = scores + (self.slopes * -(places[None] - places[:, None]).abs()).to(x.dtype)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(later, -torch.finfo(x.dtype).max)
        weights = scores.softmax(-1, dtype=torch.float32 if x.dtype == torch.bfloat16 else x.dtype).to(x.dtype)
        y = torch.einsum("b h i j, b h j d -> b h i d", weights, value).transpose(1, 2).flatten(2)
        return x + self.out(y)  # type: ignore[no-any-return]


def drawn() -> tuple[Tensor, ...]:
    return (torch.randn(3, 8, 32).requires_grad_(),)


def rows_before_the_batch() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0)  # torch's default: (positions, batch, features)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "rows before the batch": (rows_before_the_batch, lambda: (torch.randn(8, 3, 32).requires_grad_(),)),
    "einsum": (lambda: nn.Sequential(ByEinsum(), ByEinsum()), drawn),
    "einsum and slopes": (lambda: nn.Sequential(ByEinsum(alibi=True), ByEinsum(alibi=True)), drawn),
    "packed projections": (
        lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SMALL | {"hidden_size": 64})), tokens
    ),
    "norms of whole keys": (
        lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**WHOLE | {"hidden_size": 64})), tokens
    ),
    "soft cap": (lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, head_dim=16)), tokens),
}  # fmt: skip


def fused(graph: Graph, name: str) -> list[tuple[str, ...]]:
    """Return the operators of a training graph that a kernel covers as one, as far as its rule admits it."""
    named = {operator.name: operator for operator in graph.operators}
    found = []
    for cover in covers(graph, (name, KERNELS[name].partner), 8):
        if name in cover.kernels:
            members = [named[each] for each in cover.recomputed + cover.operators]
            subgraph = graph.subgraph(members, cover.inputs, cover.outputs)
            params = FORWARD if name == "triton_attention" else BACKWARD
            rows = (Candidate(name, row, params) for row in KERNELS[name].layouts(subgraph))
            if any(KERNELS[name].refuses(subgraph, row) is None for row in rows):
                found.append(cover.operators)
    return found


def softmaxes(models: Iterable[Any]) -> list[tuple[Graph, str]]:
    graphs = [training_graph(model.graph()) for model in models]
    return [(graph, each.name) for graph in graphs for each in graph.operators if each.kind == "softmax"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_attention_is_one_kernel_forward_and_one_backward(name: str) -> None:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    given = batch()
    given = tuple(each.bfloat16().detach().requires_grad_() for each in given) if isinstance(given, tuple) else given
    attentions = softmaxes(region_calls(make().to(torch.bfloat16), [given]).models.values())
    assert attentions
    for graph, softmax in attentions:
        (forward,) = fused(graph, "triton_attention")
        assert softmax in forward
        (backward,) = fused(graph, "triton_attention_grad")
        kinds = {operator.name: operator.kind for operator in graph.operators}
        assert [kinds[each] for each in backward].count("contraction") == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows before the batch", "einsum", "einsum and slopes", "soft cap"])
def test_what_they_compute_is_what_eager_computes(name: str) -> None:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model, given = make().double(), batch()

    def loss(called: Any) -> Tensor:
        if isinstance(given, tuple):
            found: Tensor = called(given[0].double()).square().mean()
            return found
        return called(**given).loss  # type: ignore[no-any-return]

    wanted = gradients(model, loss)
    compilation = Compilation(model)
    for _ in range(2):
        assert_equal(gradients(model, loss, compilation.model), wanted, 1e-12)
    assert sum(graph.tuned_places for graph in compilation.compiled) == 2


class Hiding(nn.Module):
    """Attention that hides keys as a buffer says, by a number or by -inf, or adds the buffer."""

    def __init__(self, filled: float | None) -> None:
        super().__init__()
        self.stacked, self.out, self.filled = nn.Linear(32, 96), nn.Linear(32, 32), filled

    def forward(self, x: Tensor, hides: Tensor) -> Tensor:
        query, key, value = self.stacked(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) * 0.25
        scores = scores + hides if self.filled is None else scores.masked_fill(hides, self.filled)
        return x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Twice(nn.Module):
    def __init__(self, filled: float | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Hiding(filled) for _ in range(2))

    def forward(self, x: Tensor, hides: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, hides)
        return x


@pytest.mark.slow
@pytest.mark.parametrize(("filled", "is_mask"), [(-torch.inf, True), (-1e9, False), (None, False)])
def test_keys_are_hidden_by_a_mask_where_a_query_that_sees_none_gets_what_eager_gives(
    filled: float | None, is_mask: bool
) -> None:
    """Where all keys have one large negative number, all weigh alike; kernels of attention do not know that. A boolean
    tensor that is added counts as 0 and 1."""
    torch.manual_seed(0)
    model, x = Twice(filled).double(), torch.randn(3, 8, 32).double().requires_grad_()
    hides = torch.rand(3, 1, 8, 8) < 0.3
    hides[..., 0] = False
    if filled == -1e9:
        hides[0, :, 2] = True  # a query that sees no key
    (found,) = region_calls(model, [(x, hides)]).models.values()
    assert ("mask" in [operator.kind for operator in found.graph().operators]) == is_mask

    def loss(called: Any) -> Tensor:
        result: Tensor = called(x, hides).square().mean()
        return result

    wanted = gradients(model, loss)
    compilation = Compilation(model)
    for _ in range(2):
        assert_equal(gradients(model, loss, compilation.model), wanted, 1e-12)
    assert sum(graph.tuned_places for graph in compilation.compiled) == 2


def test_another_expression_of_the_scores_is_no_soft_cap() -> None:
    class Squashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stacked, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.stacked(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
            scores = torch.tanh(query @ key.transpose(-2, -1)) * 2 + torch.sigmoid(query @ key.transpose(-2, -1))
            return x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    model = nn.Sequential(Squashed(), Squashed()).bfloat16()
    attentions = softmaxes(region_calls(model, [(torch.randn(2, 8, 32).bfloat16().requires_grad_(),)]).models.values())
    assert attentions
    assert all(fused(graph, "triton_attention") == [] for graph, _ in attentions)
