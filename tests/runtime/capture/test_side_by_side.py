"""Axes that are side by side wherever one of them is are one axis of a region."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autotuner.api.survey import region_calls
from autotuner.ir.autodiff import training_graph
from autotuner.runtime.capture.axes import Axes, Axis, are_neighbours, whole
from autotuner.runtime.capture.side_by_side import runs_of
from autotuner.space import build_space, space_file
from tests.runtime.capture.test_default_configurations import SMALL, tokens

A, B, C, D, E = (Axis(extent) for extent in (2, 3, 5, 7, 11))
ALIKE = {name: size for name, size in SMALL.items() if name != "num_key_value_heads"}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt-neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**ALIKE)),
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**ALIKE)),
}


ANY = [(one, other) for one in (A, B, C, D, E) for other in (A, B, C, D, E)]


def test_axes_that_are_always_in_one_order_are_a_run() -> None:
    assert runs_of([[A, B, C, D], [C, D], [A, B, C, D, E]], [], ANY) == {
        A: (A, B), B: (A, B), C: (C, D), D: (C, D)
    }  # fmt: skip


@pytest.mark.parametrize(
    "other", [[B], [A], [B, A], [A, C, B], [C, A, B, A]], ids=["last", "first", "turned", "between", "twice"]
)
def test_axes_that_one_list_has_otherwise_are_none(other: list[Axis]) -> None:
    assert runs_of([[A, B], other], [], ANY) == {}


def test_what_is_no_run_in_one_name_of_a_tensor_is_none_in_the_other() -> None:
    assert runs_of([], [([A, B], [C, D])], ANY).keys() == {A, B, C, D}
    assert runs_of([[D]], [([A, B], [C, D])], ANY) == {}
    # C and D are apart, so A and B are, and so E and the axis behind it are.
    last = Axis(13)
    assert runs_of([[D]], [([E, last], [A, B]), ([A, B], [C, D])], [*ANY, (E, last)]) == {}


def test_axes_are_joined_where_they_are_parts_of_one() -> None:
    assert runs_of([[A, B]], [], []) == {}
    axes, whole_axis, other = Axes(), Axis(24), Axis(6)
    axes.split(whole_axis, 2)
    _, rest = whole([whole_axis])
    axes.split(rest, 3)
    assert [each.extent for each in whole([whole_axis])] == [2, 3, 4]
    one, two, three = whole([whole_axis])
    assert are_neighbours(one, two)
    assert are_neighbours(two, three)
    assert not any(are_neighbours(*pair) for pair in [(two, one), (one, three), (one, other), (other, one)])


def test_equal_layers_are_one_region_though_the_first_reads_what_torch_makes() -> None:
    class Forward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
            return y

    found = region_calls(nn.Sequential(Forward(), Forward(), Forward()), [(torch.randn(2, 3, 16),)])
    assert list(found.runs.values()) == [3]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_attention_of_heads_that_are_turned_in_part_has_fused_kernels(name: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]().to(torch.bfloat16)
    (region,) = region_calls(model, [tokens()]).models.values()
    graph = region.graph()
    (softmax,) = (operator.name for operator in graph.operators if operator.kind == "softmax")
    covers = {
        choice.candidate.kernel: choice.cover.operators
        for choice in build_space(training_graph(graph), space_file("cuda")).choices
        if softmax in choice.cover.operators
    }
    kinds = {operator.name: operator.kind for operator in graph.operators}
    assert [kinds[each] for each in covers["cudnn_attention"]].count("contraction") == 2
