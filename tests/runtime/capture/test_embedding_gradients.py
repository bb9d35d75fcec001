"""Gradients of embeddings that are rewritten: torch's values, without a whole weight in float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.compilers import nop
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional

from autotuner.api.backend import compiler_of
from autotuner.runtime.capture import embedding_gradients
from autotuner.runtime.capture.embedding_gradients import EmbeddingGradients, gradient_of

WORDS, WIDTH, ROWS = 300, 16, (4, 24)
PADDING = 3


class Net(nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.middle(self.embedding(ids)).flatten(0, 1)
        logits = (self.head.weight @ x.t()).t()  # whose gradient is a product's result, as Inductor makes it of others
        return functional.cross_entropy(logits.float(), labels.flatten())


def batch(rows: tuple[int, int] = ROWS) -> tuple[Tensor, Tensor]:
    """Return ids, of which many are equal and some are padding, and labels."""
    torch.manual_seed(1)
    return torch.randint(0, 12, rows), torch.randint(0, WORDS, rows)


def gradients(model: nn.Module, run: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.autograd.backward(run(*given))
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def compiled(model: nn.Module, seen: list[fx.Graph], *, rewrites: bool = True) -> Callable[..., Tensor]:
    """Return a model whose backward runs as Inductor gets it, node by node, and note its graph."""

    def backward(graph: Any, _: Any) -> Any:
        if rewrites:
            EmbeddingGradients()(graph.graph)
            graph.recompile()
        seen.append(graph.graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=nop, bw_compiler=backward, decompositions=select_decomp_table())
    made: Callable[..., Tensor] = torch.compile(model, backend=backend)
    return made


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)]


def exact(model: nn.Module, is_tied: bool, *given: Tensor) -> list[Tensor]:
    double = Net(is_tied).double()
    double.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    return gradients(double, double, *given)


def whole(graph: fx.Graph, dtype: torch.dtype) -> int:
    """Return how many tensors in a graph are as large as the embedding, of a type."""
    values = [node.meta.get("val") for node in graph.nodes if node.op == "call_function"]
    return sum(isinstance(v, Tensor) and tuple(v.shape) == (WORDS, WIDTH) and v.dtype == dtype for v in values)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "alone"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_torch_s_and_as_exact(dtype: torch.dtype, is_tied: bool) -> None:
    model, given = Net(is_tied).to(dtype), batch()
    after, before = list[fx.Graph](), list[fx.Graph]()
    mine = gradients(model, compiled(model, after), *given)
    plain = gradients(model, compiled(model, before, rewrites=False), *given)
    wanted = exact(model, is_tied, *given)
    for own, other in zip(errors(mine, wanted), errors(plain, wanted), strict=True):
        assert own <= 1.05 * other + 1e-7
    if dtype == torch.bfloat16:
        assert whole(before[0], torch.float32) >= 2
        assert whole(after[0], torch.float32) == 0
    elif is_tied:
        assert whole(after[0], torch.float32) == whole(before[0], torch.float32) - 2  # no zeros, and no sum of both
    else:
        assert whole(after[0], torch.float32) == whole(before[0], torch.float32)  # nothing to win


def test_where_most_words_occur_all_stays_as_it_is() -> None:
    model, seen = Net(True).to(torch.bfloat16), list[fx.Graph]()
    gradients(model, compiled(model, seen), *batch((4, WORDS // 4)))
    assert whole(seen[0], torch.float32) >= 2
    assert not any(gradient_of(node) for node in seen[0].nodes)


def test_where_values_must_be_equal_from_run_to_run_all_stays_as_it_is() -> None:
    model, seen = Net(True).to(torch.bfloat16), list[fx.Graph]()
    torch.use_deterministic_algorithms(True)
    try:
        gradients(model, compiled(model, seen), *batch())
    finally:
        torch.use_deterministic_algorithms(False)
    assert any(gradient_of(node) for node in seen[0].nodes)


class Summed(nn.Module):
    """An embedding, and a term of its weight whose gradient is one row for all words, or one sum of one's own."""

    def __init__(self, dtype: torch.dtype, is_own: bool) -> None:
        super().__init__()
        self.weight, self.is_own = nn.Parameter(torch.ones(WORDS, WIDTH, dtype=dtype)), is_own

    def forward(self, ids: Tensor) -> Tensor:
        if self.is_own:  # of numbers that no type of the weight holds
            counts = torch.zeros(WORDS, WIDTH, dtype=torch.float32, device=ids.device)
            counts = counts.index_add(0, ids, self.weight[ids].float() ** 2)
            return (counts.to(torch.bfloat16) + self.weight).float().sum()
        return functional.embedding(ids, self.weight).float().pow(2).sum() + 300 * self.weight.sum(1).mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nothing_is_added_to_a_gradient_that_is_one_row_for_all_words(dtype: torch.dtype) -> None:
    model, seen = Summed(dtype, is_own=False), list[fx.Graph]()
    ids = torch.tensor([1, 1, 2])
    compiled(model, seen, rewrites=False)(ids).backward()  # type: ignore[no-untyped-call]
    found = [each for each in map(gradient_of, seen[0].nodes) if each is not None]
    assert [each.head for each in found] == ([None] if dtype == torch.bfloat16 else [])


def test_sums_of_one_s_own_stay_as_they_are() -> None:
    model, seen = Summed(torch.bfloat16, is_own=True), list[fx.Graph]()
    compiled(model, seen, rewrites=False)(torch.tensor([1, 1, 2])).backward()  # type: ignore[no-untyped-call]
    assert any("index_put" in str(node.target) for node in seen[0].nodes)
    assert not any(gradient_of(node) for node in seen[0].nodes)


@pytest.mark.slow
def test_what_inductor_compiles_of_it_has_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    count, own = list[int](), embedding_gradients.rewrite

    def counted(*given: Any) -> None:
        count.append(1)
        own(*given)

    monkeypatch.setattr(embedding_gradients, "rewrite", counted)
    model, given = Net(True).to(torch.bfloat16), batch()
    wanted = exact(model, True, *given)
    mine = gradients(model, torch.compile(model, backend=compiler_of("inductor")), *given)
    assert count == [1]
    torch._dynamo.reset()
    plain = gradients(model, torch.compile(model), *given)
    assert all(a <= 1.05 * b + 1e-7 for a, b in zip(errors(mine, wanted), errors(plain, wanted), strict=True))
