"""Fragments of nodes: traced once for equal nodes of all graphs, and anew where torch would make other calls."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from autotuner.runtime.capture import fragments
from autotuner.runtime.capture.calls import is_number
from tests.runtime.capture.known import Compilation, assert_equal, gradients


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Functions that are traced, from nothing that is kept."""
    found: list[Any] = []

    def noting(function: Any, **options: Any) -> Any:
        found.append(function)
        return make_fx(function, **options)

    monkeypatch.setattr("autotuner.runtime.capture.fragments.make_fx", noting)
    monkeypatch.setattr(fragments, "_shared", type(fragments._shared)())
    return found


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.linear(x)) + 1.0


def test_equal_nodes_of_several_graphs_are_traced_once(traced: list[Any]) -> None:
    Compilation(Net()).model(torch.randn(4, 8))
    count = len(traced)
    assert count == 3
    Compilation(Net()).model(torch.randn(4, 8))
    assert len(traced) == count
    Compilation(Net(6)).model(torch.randn(4, 6))
    assert len(traced) == 2 * count
    with torch.autocast("cpu", torch.bfloat16):
        Compilation(Net()).model(torch.randn(4, 8))
    assert len(traced) > 2 * count


def test_what_is_kept_holds_no_example_of_its_graph(traced: list[Any]) -> None:
    Compilation(Net()).model(torch.randn(4, 8))
    kept = list(fragments._shared.values())
    assert len(kept) == len(traced)
    nodes: list[fx.Node] = [node for fragment in kept for node in fragment.graph.nodes]
    assert {key for node in nodes for key in node.meta} == {"val"}
    assert {node.meta["val"].fake_mode for node in nodes if "val" in node.meta} == {fragments._examples}


def test_as_many_are_kept_as_there_may_be(traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments, "MOST", 2)
    Compilation(Net()).model(torch.randn(4, 8))
    assert len(fragments._shared) == 2
    assert len(traced) == 3


def test_a_constant_whose_text_does_not_say_all_of_it_is_not_shared() -> None:
    class Named(float):
        pass

    assert is_number(slice(None, 3))
    assert not is_number(Named(1.0))
    assert not is_number(slice(torch.ones(1), 3))


class Gated(nn.Module):
    """Layers with products of a tensor with itself, then with another one of equal shape, or the other way round."""

    def __init__(self, squares_first: bool) -> None:
        super().__init__()
        self.squares_first = squares_first
        self.gates, self.linears = (nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        for gate, linear in zip(self.gates, self.linears, strict=True):
            one, other = linear(x), gate(x)
            others = (one, other) if self.squares_first else (other, one)
            x = x + sum(functional.silu(torch.mul(one, each) + torch.atan2(one, each)) for each in others)
        return x.square().sum()


def test_a_tensor_that_is_given_twice_is_not_taken_for_two(traced: list[Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64)
    for squares_first in (True, False):
        model = Gated(squares_first).double()

        def loss(called: Any) -> Any:
            return called(x)

        compilation = Compilation(model)
        assert_equal(gradients(model, loss, compilation.model), gradients(model, loss), 1e-12)
        assert compilation.regions
    assert traced
