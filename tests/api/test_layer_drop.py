"""Models that draw a number for each layer, as transformers' did up to 5.17 at least, and drop none."""

import copy
import io
import traceback
from collections.abc import Callable
from functools import partial, update_wrapper, wraps
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotuner
from autotuner.api.layer_drop import draw_for_no_layer
from autotuner.api.survey import region_calls

WIDTH, LAYERS = 16, 3


class Encoder(nn.Module):
    """Its loop is that of OPT, BART and Whisper in transformers 5.17."""

    def __init__(self, layerdrop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.layerdrop = layerdrop

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training:
                dropout_probability = torch.rand([])
                if dropout_probability < self.layerdrop:
                    continue
            x = x + layer(x)
        return x


def counting(limit: int = 100) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Return a decorator that keeps what it decorates, and a number, as those of transformers' models do."""

    def decorator(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(forward)
        def counted(self: Any, *arguments: Any, most: int = 7, **keywords: Any) -> Tensor:
            assert len(arguments) < min(limit, most)
            return forward(self, *arguments, **keywords)

        return counted

    return decorator


class Decorated(Encoder):
    """Its forward is decorated twice, and annotated by a class of its own."""

    class Hidden:
        pass

    @counting()
    @counting(limit=5)
    def forward(self, x: Tensor, scale: float = 1.0, *, hidden: "Hidden | None" = None) -> Tensor:
        del hidden
        for layer in self.layers:
            to_drop = False
            if self.training:
                dropout_probability = torch.rand([])
                if dropout_probability < self.layerdrop:  # a comment
                    to_drop = True
            if not to_drop:
                x = x + scale * layer(x)
        return x


class Jittered(Encoder):
    """It uses what it draws otherwise, too."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            dropout_probability = torch.rand([])
            if dropout_probability < self.layerdrop:
                continue
            x = x + layer(x) * dropout_probability
        return x


class Private(Encoder):
    """Its forward reads a private name, which has the class's own in it."""

    __scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            dropout_probability = torch.rand([])
            if dropout_probability < self.layerdrop:
                continue
            x = x + layer(x) * self.__scale
        return x


def forward_of_a_module(self: Encoder, x: Tensor) -> Tensor:
    for layer in self.layers:
        dropout_probability = torch.rand([])
        if dropout_probability < self.layerdrop:
            continue
        x = x + layer(x)
    return x


class WithLoss(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.encoder(x).pow(2).mean()
        return found


@pytest.fixture(autouse=True)
def as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test the classes as they are written."""
    for each in (Encoder, Decorated, Jittered, Private):
        monkeypatch.setattr(each, "forward", vars(each)["forward"])


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 8, WIDTH)


def graphs_of(called: Any, *arguments: Any) -> int:
    """Return how many graphs dynamo makes of a call."""
    seen = []

    def look(module: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(module)
        return module.forward

    torch._dynamo.reset()
    compiled: Any = torch.compile(called, backend=look, dynamic=False)
    compiled(*arguments)
    return len(seen)


@pytest.mark.parametrize("model", [Encoder(), Decorated()])
def test_one_graph_is_made_of_all_layers_and_nothing_is_drawn(model: Encoder, x: Tensor) -> None:
    expected = model(x)
    assert graphs_of(model, x) != 1
    calls = region_calls(model, [x])
    assert (len(calls.coverage), sum(calls.runs.values())) == (1, LAYERS)
    before = torch.get_rng_state()
    assert graphs_of(model, x) == 1
    assert torch.equal(model(x), expected)
    assert torch.equal(torch.get_rng_state(), before)


class ByAnObject:
    """A decorator whose result is no function."""

    def __init__(self, forward: Any) -> None:
        update_wrapper(self, forward)  # type: ignore[arg-type]
        self.forward = forward

    def __get__(self, module: Any, _: Any = None) -> Any:
        return self if module is None else partial(self.forward, module)


@pytest.mark.parametrize("decorate", [ByAnObject, lambda forward: wraps(forward)(lambda *given: Encoder.plain(*given))])  # type: ignore[attr-defined]
def test_a_forward_whose_decorator_does_not_keep_it_runs_as_it_is(
    decorate: Any, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Encoder, "plain", Encoder.forward, raising=False)
    monkeypatch.setattr(Encoder, "forward", decorate(Encoder.forward))
    model = Encoder()
    draw_for_no_layer(model)
    before = torch.get_rng_state()
    model(x)
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_forward_that_is_written_outside_of_its_class_draws_nothing(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Encoder, "forward", forward_of_a_module)
    model = Encoder()
    draw_for_no_layer(model)
    before = torch.get_rng_state()
    model(x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("encoder", [Encoder(0.5), Jittered(), Private()])
def test_what_is_drawn_for_something_is_drawn(encoder: Encoder, x: Tensor) -> None:
    model, written = WithLoss(encoder), type(encoder).forward
    region_calls(model, [x])
    assert type(encoder).forward is written
    before = torch.get_rng_state()
    model(x)
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_probability_that_is_set_later_drops_layers(x: Tensor) -> None:
    model = Encoder()
    draw_for_no_layer(model)
    model.layerdrop = 1.0
    assert torch.equal(model(x), x)
    model.layerdrop = 0.5
    changed = {not torch.equal(Encoder.forward(model.eval(), x), model.train()(x)) for _ in range(64)}
    assert changed == {True, False}


def test_a_copy_computes_with_layers_of_its_own(x: Tensor) -> None:
    model = Encoder()
    draw_for_no_layer(model)
    draw_for_no_layer(model)  # which changes nothing more
    copied = copy.deepcopy(model)
    nn.init.zeros_(copied.layers[0][3].weight)  # type: ignore[index]
    assert not torch.equal(copied(x), model(x))
    shallow = copy.copy(model)
    shallow._modules = {"layers": copied.layers}
    assert torch.equal(shallow(x), copied(x))


def test_a_model_is_saved_as_it_was(x: Tensor) -> None:
    model, file = Encoder(), io.BytesIO()
    names = model.state_dict().keys()
    draw_for_no_layer(model)
    assert model.state_dict().keys() == names
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert vars(loaded).keys() == vars(Encoder()).keys()
    assert torch.equal(loaded(x), model(x))


def test_steps_and_optimized_models_draw_nothing(x: Tensor) -> None:
    optimized = WithLoss(Encoder())
    autotuner.optimize(optimized, compiler="eager", watch=None)
    stepped = WithLoss(Encoder())
    autotuner.training_step(
        stepped, torch.optim.SGD(stepped.parameters(), 0.1), loss=lambda model, batch: model(batch), compiler="eager"
    )
    assert [graphs_of(each, x) for each in (optimized, stepped)] == [1, 1]


def test_what_is_written_anew_has_the_lines_and_arguments_that_it_had(x: Tensor) -> None:
    model = Decorated()
    draw_for_no_layer(model)
    assert signature(model.forward) == signature(Decorated().forward)
    torch.testing.assert_close(model(x, scale=0.0), x)
    with pytest.raises(AssertionError):
        model.forward(*[x] * 5)
    with pytest.raises(TypeError) as error:
        model.forward(None)
    lines = [each.line for each in traceback.extract_tb(error.tb) if each.filename == __file__]
    assert lines[-2:] == ["return forward(self, *arguments, **keywords)", "x = x + scale * layer(x)"]


@pytest.mark.gpu
def test_a_step_of_such_a_model_is_captured(x: Tensor) -> None:
    model = WithLoss(Encoder()).cuda()
    plain = copy.deepcopy(model)
    step = autotuner.training_step(
        model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda model, batch: model(batch), compiler="eager"
    )
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(5):
        expected = plain(x.cuda())
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(step(x), expected.detach())
    assert (step.replays, step.note, graphs_of(model, x.cuda())) == (3, "", 1)
