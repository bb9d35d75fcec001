"""Updates in place of what a graph makes, read as what they compute."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional

from autotuner.runtime.capture import functional_forms
from autotuner.runtime.capture.changed_in_place import changed_in_place
from autotuner.runtime.capture.out_of_place import out_of_place
from autotuner.runtime.capture.placed import placed
from tests.runtime.capture.known import Compilation, assert_equal, gradients

HIDDEN, LENGTH, HEADS = 16, 6, 2
Program = Callable[[Tensor, Tensor], Any]


class Rewritten:
    """A function as a graph out of place; `reasons` are those of what is changed in place still."""

    def __init__(self, program: Program) -> None:
        self.reasons: list[str] = []
        self.graph: fx.Graph | None = None
        torch._dynamo.reset()
        self.called = torch.compile(program, backend=self._compile, dynamic=False)

    def _compile(self, module: fx.GraphModule, inputs: list[Tensor]) -> Any:  # noqa: ARG002
        self.reasons += out_of_place(module.graph).values()
        self.graph = module.graph
        module.graph.lint()
        module.recompile()
        assert bool(self.reasons) == bool(changed_in_place(module.graph))
        return module


def tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    return first.requires_grad_(), second.requires_grad_()


def values_of(program: Program) -> list[Tensor]:
    """Return results of a program, and the gradients of what it is given."""
    given_to = tensors()
    made = program(*given_to)
    results = [each for each in (made if isinstance(made, tuple) else (made,)) if each.requires_grad]
    weights = [torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view(each.shape) for each in results]
    wanted = torch.autograd.grad(results, given_to, weights, allow_unused=True)
    return [
        *(each.detach() for each in results),
        *(torch.zeros(4, 6, dtype=torch.float64) if each is None else each for each in wanted),
    ]


def check(program: Program) -> Rewritten:
    """Check that a program out of place has the values and the gradients that it has in place."""
    wanted = values_of(program)
    rewritten = Rewritten(program)
    found = values_of(rewritten.called)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    return rewritten


def scaled(x: Tensor, y: Tensor) -> Tensor:
    z = x * 1.5
    z += y
    z = z.mul_(y).clamp_(min=-1.0)
    found: Tensor = functional.relu(z, inplace=True) * nn.SiLU(inplace=True)(y + z)
    return found


def activated(x: Tensor, y: Tensor) -> Tensor:
    z = functional.relu_(x * 1.5)
    z = functional.elu_(z - y)
    z = functional.leaky_relu_(z * 2, 0.1)
    z = functional.hardtanh_(z + x)
    z = torch.threshold_(z * y, 0.25, 0.5)
    found: Tensor = functional.selu_(functional.celu_(z.clone()) * 1.5)
    return found


def read_before_and_after(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x + y
    before = z * 2
    z.add_(x)
    return before, z * y


def read_through_a_view(x: Tensor, y: Tensor) -> Tensor:
    z = x + 0
    rows, columns = z.view(2, 2, 6), z.t()
    z *= y
    return rows.sum(0).sum() * columns.cos()


def changed_through_views(x: Tensor, y: Tensor) -> Tensor:
    z = x * 1.0
    z.view(2, 2, 6).transpose(0, 1)[1].mul_(3.0)
    z[:, 1:4] = y[:, :3]
    z[0] += 1.0
    z[..., -1] = 2.0
    z.narrow(0, -2, 2).select(1, 0).copy_(y[:2, 0])
    z.permute(1, 0)[2::2] *= y.t()[::3]
    return z


def filled(x: Tensor, y: Tensor) -> Tensor:
    z = torch.zeros(4, 6, dtype=x.dtype)
    seen = z.view(-1)
    z[1:, ::2] = x[1:, ::2]
    z[y > 0] = 0.5
    z.masked_fill_(x > 1, -2.0)
    return z + seen.sum() + seen[3] * y


def two_tensors(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a, b = x * 2, y * 3
    parts = a[:2], a.select(0, 3)
    a[:2] = b[2:]
    b += a
    a.mul_(b)
    return parts[0] * b[:2] + parts[1], a, b


def part_of_several(x: Tensor, y: Tensor) -> Tensor:
    largest, _ = (x * y).max(1)
    largest += 1.0
    return largest * x[:, 0]


def cast_back(x: Tensor, y: Tensor) -> Tensor:
    z = x.float()
    z += y
    z[1] = y[0]
    return z.double()


def outside(x: Tensor, y: Tensor) -> Tensor:
    z = x.detach().view(-1)
    z.mul_(2.0)
    return z.view(4, 6) * y


def past_the_gradient(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    z.detach().mul_(3.0)
    return z * y


def without_gradients(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    with torch.no_grad():
        z.mul_(3.0)
    return z * y


def by_chance(x: Tensor, y: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z.bernoulli_(1.0)
    return z * y


COVERED = [scaled, activated, read_before_and_after, read_through_a_view, changed_through_views, filled, two_tensors,
           part_of_several, cast_back]  # fmt: skip


@pytest.mark.parametrize("program", COVERED)
def test_changes_of_what_a_graph_makes_become_calls_that_change_nothing(program: Program) -> None:
    assert check(program).reasons == []


@pytest.mark.parametrize(
    ("program", "reason"),
    [(outside, "comes from outside of the graph, as l_x_"), (past_the_gradient, "through a view by detach"),
     (without_gradients, "in a part without gradients"), (by_chance, "bernoulli_ returns it")],
)  # fmt: skip
def test_other_changes_stay_and_have_a_reason(program: Program, reason: str) -> None:
    (found,) = check(program).reasons
    assert reason in found


def test_the_module_of_a_call_is_known_after_it() -> None:
    layer = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)).double()
    rewritten = check(lambda x, y: layer(x) * y)
    assert rewritten.graph is not None
    (relu,) = [node for node in rewritten.graph.nodes if node.target is functional.relu]
    assert list(relu.meta["nn_module_stack"].values())[-1][1] is nn.ReLU
    assert relu.meta["example_value"].requires_grad
    assert relu.kwargs.get("inplace", False) is False or relu.args[1:] == (False,)


def summed(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.norm(x)
    y += x
    return y


def seen_through_a_view(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.norm(x)
    rows = y.view(-1, HIDDEN)
    y.add_(x)
    return rows.view(x.shape)


class Layer(nn.Module):
    """A feed-forward part between a function that works in place and a residual sum that does."""

    def __init__(self, inside: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.inside = nn.LayerNorm(HIDDEN), inside
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.activation(self.up(self.inside(self, x))))
        y += x
        return y


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("inside", [summed, seen_through_a_view])
def test_layers_that_work_in_place_run_tuned(inside: Callable[[Any, Tensor], Tensor], compiler: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(inside) for _ in range(3))).double()
    x = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64)

    def loss(called: Any) -> Tensor:
        found: Tensor = called(x).square().mean()
        return found

    compilation = Compilation(model, compiler=compiler)
    wanted = gradients(model, loss)
    assert_equal(gradients(model, loss, compilation.model), wanted, 1e-12)
    (graph,) = compilation.compiled
    assert graph.tuned_places == 3
    assert not any("in place" in reason for reason in graph.reasons)


INDEXES = [0, -1, slice(1, 3), slice(None, None, 2), (slice(None), slice(2, None)), (..., 0), (1, slice(1, 4)),
           (slice(0, 0),), (None, 2), (slice(None), None, 3), [0, 2], torch.tensor([1, 1, 3])]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=str)
@pytest.mark.parametrize("number", [True, False])
def test_an_assignment_as_a_function_is_the_assignment(index: Any, number: bool) -> None:
    x, y = tensors()
    changed = x.clone()
    value = 2.5 if number else y[index].cos()
    changed[index] = value
    found = placed(x, value, index)
    assert torch.equal(found, changed)
    assert found.stride() == changed.stride()
    weights = torch.arange(24.0, dtype=x.dtype).view(4, 6)
    one, other = (
        torch.autograd.grad((each * weights).sum(), [x, y], allow_unused=True, retain_graph=True)
        for each in (found, changed)
    )
    for mine, theirs in zip(one, other, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


STEPS: list[tuple[str, Callable[[Tensor, Tensor], Any]]] = [
    ("x[i] = x + y", lambda x, y: x + y),
    ("x * y", lambda x, y: x * y.cos()),
    ("view", lambda x, _: x.view(-1, 3).view(4, 6)),
    ("rows", lambda x, _: x[::2].repeat(2, 1)),
    ("x += y", lambda x, y: x.add_(y)),
    ("x.view *= 2", lambda x, _: x.view(3, 8).mul_(2.0).view(4, 6)),
    ("x[1:] = y", lambda x, y: x.__setitem__((slice(1, None),), y[:3])),
    ("x[:, 0] += 1", lambda x, _: x[:, 0].add_(1.0)),
    ("x.t() *= y.t()", lambda x, y: x.t().mul_(y.t().sin())),
    ("x.copy_(y)", lambda x, y: x.copy_(y)),
    ("relu_", lambda x, _: functional.leaky_relu(x, 0.3, inplace=True)),
    ("x[0].masked_fill_", lambda x, y: x[0].masked_fill_(y[1] > 0, 0.25)),
    ("x[mask] = 1", lambda x, y: x.__setitem__(y > 1, 1.0)),
    ("unsqueeze", lambda x, _: x.unsqueeze(0).flatten(0, 1)),
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 7), st.integers(0, 7)), min_size=3, max_size=9)
)
def test_programs_with_aliases_compute_what_they_compute_in_place(steps: list[tuple[int, int, int]]) -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        pool = [x * 1.0, y * 1.0]
        for number, first, second in steps:
            a, b = pool[first % len(pool)], pool[second % len(pool)]
            made = STEPS[number][1](a, b * 1.0)
            if isinstance(made, Tensor) and made.shape == x.shape:
                pool.append(made)
        return tuple(each * 1.0 for each in pool)

    try:
        values_of(program)
    except RuntimeError:  # eager has changed what its own backward reads
        reject()
    assert check(program).reasons == []


@pytest.mark.skipif(not hasattr(torch.Tag, "inplace"), reason="this version of torch does not tag them")
def test_operators_that_change_their_first_argument_are_those_that_torch_tags() -> None:
    names = {each.partition("::")[2].partition(".")[0] for each in torch._C._dispatch_get_all_op_names()
             if each.startswith("aten::")}  # fmt: skip
    found = {name for name in names if functional_forms._is_changing(name)}
    tagged = {name for name in found if any(torch.Tag.inplace in getattr(getattr(torch.ops.aten, name), each).tags
                                            for each in getattr(torch.ops.aten, name).overloads())}  # fmt: skip
    assert found == tagged
    assert {"relu_", "add_", "masked_fill_", "silu_"} <= found
    assert found.isdisjoint({"bernoulli_", "dropout_", "transpose_", "squeeze_", "_fused_adam_"})


def mapped(x: Tensor, y: Tensor) -> Tensor:
    def of_row(row: Tensor, other: Tensor) -> Tensor:
        z = row * 1.5
        z.mul_(other)
        return z + row

    found: Tensor = torch.vmap(of_row)(x, y)
    return found


def mapped_into_a_view(x: Tensor, y: Tensor) -> Tensor:
    z = x * 1.5
    sums: Tensor = torch.vmap(lambda row, other: row.mul_(other).sum())(z, y)
    return z.sum(1) * sums


def behind_a_gradient(x: Tensor, y: Tensor) -> Tensor:
    z = x * 1.5
    z += y
    found: Tensor = z * torch.func.grad(lambda each: (each * each).sum())(z.detach())
    return found


@pytest.mark.parametrize("program", [mapped, mapped_into_a_view, behind_a_gradient])
def test_what_a_transform_of_functions_wraps_stays_changed_in_place(program: Program) -> None:
    assert check(program).reasons
