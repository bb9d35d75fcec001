"""Models under autocast: tuned regions of several types compute what torch does, in the types that torch gives."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autotuner.space.fusion import stack_groups
from tests.runtime.capture.known import Compilation, assert_equal, gradients
from tests.runtime.capture.test_models import (
    DECODER_LAYERS,
    LAYERS,
    LENGTH,
    gpt2,
    loss_of,
    padded_bert,
    padded_llama,
    t5,
    vit,
)

Loss = Callable[[Any], Tensor]
LOW = torch.bfloat16


def autocast(loss: Loss, low: torch.dtype = LOW, device_type: str = "cpu") -> Loss:
    def inside(model: Any) -> Tensor:
        with torch.autocast(device_type, low):
            return loss(model)

    return inside


def widened(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: each.double() if isinstance(each, Tensor) and each.is_floating_point() else each
            for name, each in arguments.items()}  # fmt: skip


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the norm of the error of all gradients, as a share of that of all gradients."""
    names = [name for name in wanted if name != "loss"]
    off, whole = (
        [(found[name].double() - wanted[name]).norm() for name in names],
        [wanted[name].norm() for name in names],
    )
    return float(torch.stack(off).norm() / torch.stack(whole).norm())


def check_close(model: nn.Module, of_wide: Loss, loss: Loss, compilation: Compilation) -> None:
    """Check gradients against float64: types as torch's, errors no worse than its own up to chance."""
    wanted = gradients(copy.deepcopy(model).double(), of_wide)
    eager = gradients(model, loss)
    for _ in range(2):
        found = gradients(model, loss, compilation.model)
    assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in eager.items()}
    assert distance(found, wanted) <= 1.25 * distance(eager, wanted)


def small(**more: Any) -> tuple[nn.TransformerEncoder, Loss]:
    """Return an encoder of torch's own, and a loss that calls it in the type of its parameters.

    Its activation is smooth: the gradient of a ReLU is off by all of itself where rounding changes a sign.
    """
    torch.manual_seed(0)
    options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu"} | more
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model, summed(*torch.randn(2, 2, LENGTH, 32))


def summed(x: Tensor, weights: Tensor) -> Loss:
    """Return the loss of a model's call: a weighted sum."""

    def loss(called: Any) -> Tensor:
        y: Tensor = called(x.to(next(called.parameters()).dtype))
        return (y.to(weights.dtype) * weights).sum()

    return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "tuned"),
    [(padded_bert, LAYERS), (gpt2, LAYERS), (padded_llama, LAYERS), (vit, LAYERS), (t5, LAYERS + DECODER_LAYERS)],
)
def test_layers_of_a_model_run_tuned_as_well_as_torch_computes_them(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], tuned: int
) -> None:
    torch.manual_seed(0)
    model, arguments = make()
    compilation = Compilation(model)
    check_close(model, loss_of(widened(arguments)), autocast(loss_of(arguments)), compilation)
    assert sum(graph.tuned_places for graph in compilation.compiled) == tuned


@pytest.mark.slow
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_layers_of_torchs_own_run_tuned_in_either_type(low: torch.dtype) -> None:
    model, loss = small()
    compilation = Compilation(model)
    check_close(model, loss, autocast(loss, low), compilation)
    (compiled,) = compilation.compiled
    assert compiled.headline == "2 of 2 regions run tuned (1 of 1 kinds): 100% of the flop of the model's forward"
    (first, second) = compilation.regions
    dtypes = {tensor.dtype for tensor in first.plan.configuration.graph().tensors.values()}
    assert dtypes == {"float32", str(low).removeprefix("torch.")}
    assert first.plan is second.plan


class Partly(nn.Module):
    """One layer under autocast, one in float32 inside of that, and one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True) for _ in range(3)
        )
        self.between = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", LOW):
            x = self.layers[0](x)
            x = torch.cos(self.between(x))  # left to the other compiler, in the context that it is in
            with torch.autocast("cpu", enabled=False):
                x = self.layers[1](x.float())
        y: Tensor = self.layers[2](x)
        return y


class Checkpointing(Partly):
    """The same three layers, each of which is checkpointed in its context."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", LOW):
            x = checkpoint(self.layers[0], x, use_reentrant=False)
            x = torch.cos(self.between(x))
            with torch.autocast("cpu", enabled=False):
                x = checkpoint(self.layers[1], x.float(), use_reentrant=False)
        y: Tensor = checkpoint(self.layers[2], x, use_reentrant=False)
        return y


@pytest.mark.slow
@pytest.mark.parametrize("make", [Partly, Checkpointing])
def test_each_part_of_a_model_has_the_types_of_its_own_context(make: type[Partly]) -> None:
    torch.manual_seed(0)
    model, x, weights = make(), torch.randn(2, LENGTH, 32), torch.randn(2, LENGTH, 32)
    compilation = Compilation(model, compiler="aot_eager")

    def wide(called: Any) -> Tensor:
        y = called.layers[0](x.double())
        y = called.layers[1](torch.cos(called.between(y)))
        total: Tensor = (called.layers[2](y) * weights).sum()
        return total

    check_close(model, wide, summed(x, weights), compilation)
    assert sum(graph.tuned_places for graph in compilation.compiled) == 3
    found = [region.plan.configuration.graph() for region in compilation.regions]
    assert [{tensor.dtype for tensor in graph.tensors.values()} for graph in found] == [
        {"float32", "bfloat16"}, {"float32"}, {"float32"},
    ]  # fmt: skip


class Choosing(nn.Module):
    """Layers that choose one of two rows by a list, all of them in a context."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.context = context
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(16, 16)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            for layer in self.layers:
                two = layer["up"](x).view(2, LENGTH, 2, 16)  # type: ignore[index]
                x = x + layer["down"](F.gelu(two[:, :, [1]].squeeze(2)))  # type: ignore[index]
        return x


@pytest.mark.slow
def test_a_context_in_which_autocast_is_off_changes_nothing_that_is_read() -> None:
    x, weights = torch.randn(2, LENGTH, 16), torch.randn(2, LENGTH, 16)
    found = []
    for context in (nullcontext, partial(torch.autocast, "cpu", enabled=False)):
        model = Choosing(context)
        compilation = Compilation(model, compiler="aot_eager")
        gradients(model, summed(x, weights), compilation.model)
        graphs = [region.plan.configuration.graph() for region in compilation.regions]
        found.append([[operator.kind for operator in graph.operators] for graph in graphs])
    assert len(found[0]) == 2
    assert "program" in found[0][0]
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_model_is_read_anew_where_autocast_is_off() -> None:
    model, loss = small()
    compilation = Compilation(model)
    mixed = gradients(model, autocast(loss), compilation.model)
    plain = gradients(model, loss, compilation.model)
    assert_equal(plain, gradients(model, loss), 2e-6)
    assert distance(mixed, {name: each.double() for name, each in plain.items()}) > 1e-4
    assert [graph.tuned_places for graph in compilation.compiled] == [2, 2]


@pytest.mark.slow
def test_frozen_and_tied_parameters_have_the_gradients_that_torch_gives_them() -> None:
    model, loss = small()
    first, second = model.layers
    assert isinstance(first, nn.TransformerEncoderLayer)
    assert isinstance(second, nn.TransformerEncoderLayer)
    second.linear1.weight = first.linear1.weight
    first.linear2.weight.requires_grad_(False)
    second.norm1.requires_grad_(False)
    compilation = Compilation(model)
    check_close(model, loss, autocast(loss), compilation)
    assert compilation.compiled[0].tuned_places == 2


@pytest.mark.slow
def test_parameters_that_change_are_cast_again_in_the_next_step() -> None:
    model, loss = small()
    compilation = Compilation(model)
    gradients(model, autocast(loss), compilation.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    wanted = gradients(copy.deepcopy(model), autocast(loss))
    assert_equal(gradients(model, autocast(loss), compilation.model), wanted, 0.02)


@pytest.mark.slow
def test_dropout_under_autocast_drops_and_trains() -> None:
    model, loss = small(dropout=0.4)
    compilation = Compilation(model)
    torch.manual_seed(1)
    first = gradients(model, autocast(loss), compilation.model)
    again = gradients(model, autocast(loss), compilation.model)
    assert compilation.compiled[0].tuned_places == 2
    assert not torch.equal(first["loss"], again["loss"])
    assert all(each.isfinite().all() for each in first.values())
    assert {each.dtype for name, each in first.items() if name != "loss"} == {torch.float32}


def test_scaled_losses_of_float16_are_unscaled_and_checked() -> None:
    def trained(compiled: bool) -> tuple[list[float], nn.Module, float]:
        model, loss = small()
        run = Compilation(model).model if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-7, growth_interval=2)
        scales = []
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(autocast(loss, torch.float16)(run)).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, model, float(norm)

    scales, model, norm = trained(True)
    wanted, reference, wanted_norm = trained(False)
    assert scales == wanted
    assert scales[0] < 2.0**24  # some steps overflowed, and were left out
    assert norm == pytest.approx(wanted_norm, rel=0.02)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


class Casting(nn.Module):
    """Attention written out, whose softmax is in float32 between casts; `look` says what else reads the weights."""

    def __init__(self, look: str = "", p: float = 0.0) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.look, self.p = look, p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x) for each in (self.query, self.key, self.value))
        weights = F.softmax(q @ k.transpose(1, 2) * 0.2, -1, dtype=torch.float32)
        weights = F.dropout(weights, self.p)
        if self.look == "float32":
            wide: Tensor = weights @ v.float()
            return wide
        y: Tensor = weights.to(v.dtype) @ v
        return y + torch.cos(weights).sum(-1, keepdim=True).to(y.dtype) if self.look == "both" else y


def kinds(compilation: Compilation) -> list[tuple[str, str]]:
    """Return kind and type of what each forward operator of the first region makes."""
    graph = compilation.regions[0].plan.configuration.model.graph()
    return [(operator.kind, graph.tensors[operator.outputs[0]].dtype) for operator in graph.operators]


@pytest.mark.parametrize(("look", "wanted"), [("", "bfloat16"), ("float32", "float32"), ("both", "float32")])
def test_a_softmax_between_casts_is_one_of_the_lower_type_only_where_nobody_reads_more(look: str, wanted: str) -> None:
    torch.manual_seed(0)
    model, x = Casting(look).to(LOW), torch.randn(2, LENGTH, 32).to(LOW)
    compilation = Compilation(model)
    loss = summed(x, torch.randn(2, LENGTH, 32))
    check_close(model, loss, loss, compilation)
    assert ("softmax", wanted) in kinds(compilation)


@pytest.mark.parametrize(("look", "wanted"), [("", "bfloat16"), ("float32", "float32")])
def test_dropped_weights_are_of_the_lower_type_where_they_are_cast_to_it(look: str, wanted: str) -> None:
    compilation = Compilation(Casting(look, 0.5).to(LOW))
    compilation.model(torch.randn(2, LENGTH, 32, dtype=LOW)).float().sum().backward()
    found = kinds(compilation)
    assert {("softmax", wanted), ("dropout_mask", wanted), ("dropout", wanted)} <= set(found)
    assert [kind for kind, _ in found].count("cast") == (2 if look else 0)


@pytest.mark.parametrize("low", [torch.bfloat16, None])
def test_query_key_and_value_are_siblings_whether_their_weights_are_cast_or_not(low: torch.dtype | None) -> None:
    compilation = Compilation(Casting())
    with torch.autocast("cpu", low, enabled=low is not None):
        compilation.model(torch.randn(2, LENGTH, 32)).sum().backward()
    (region,) = compilation.regions
    (group, *_) = stack_groups(region.plan.configuration.graph())
    assert len(group.operators) == 3
