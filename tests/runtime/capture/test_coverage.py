"""What a summary says of a compiled model: the share of its flop that runs tuned, and what is left out, and why."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autotuner
from autotuner.errors import InputError
from autotuner.ir.models import Model
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import memory
from autotuner.runtime.capture.calls import calls_of, run_on_examples
from autotuner.runtime.capture.module_costs import common_module
from autotuner.runtime.coverage import Coverage, LeftOut, percent
from autotuner.runtime.step_times import StepShare
from tests.runtime.capture.known import Compilation, Known
from tests.runtime.capture.test_backend import HIDDEN, inputs

SIDES = ("inputs", "outputs")
LENGTH, WIDTH, CLASSES = 6, 24, 10
CUT = "cut off by as_strided: no rule for aten.as_strided.default, and it stays torch's: its result depends on strides"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.query, self.key = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.value, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        seen = functional.scaled_dot_product_attention(q, k, v)
        made: Tensor = x + self.out(seen.transpose(1, 2).flatten(-2))
        return made


class FeedForward(nn.Module):
    def __init__(self, unknown: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.unknown = unknown

    def forward(self, x: Tensor) -> Tensor:
        y = self.between(functional.gelu(self.up(self.norm(x))))
        made: Tensor = x + self.between(self.down(y))
        return made

    def between(self, x: Tensor) -> Tensor:
        """Return the same, by a call that is not known where this model has such."""
        return x.as_strided(x.shape, x.stride()) if self.unknown else x


class Layered(nn.Module):
    """Layers of attention and feed-forward, in the middle of which there may be an operator that is not known."""

    def __init__(self, unknown: bool, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attention": Attention(), "mlp": FeedForward(unknown)}) for _ in range(layers)
        )
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["mlp"](layer["attention"](x))  # type: ignore[index]
        found: Tensor = self.head(x)
        return found


def compiled(model: nn.Module, knowledge: Known | None = None) -> Compilation:
    compilation = Compilation(model, knowledge)
    compilation.model(inputs(2, LENGTH))
    return compilation


@pytest.mark.slow
def test_a_part_of_a_layer_that_is_left_out_is_named_with_its_share_and_its_reason() -> None:
    model = Layered(unknown=True)
    compiled(model)
    found = autotuner.summary(model)
    tokens = 2 * LENGTH
    of_product, of_head = 3 * 2 * tokens * HIDDEN * WIDTH, 2 * tokens * HIDDEN * CLASSES
    of_attention = 3 * (4 * 2 * tokens * HIDDEN * HIDDEN + 4 * tokens * LENGTH * HIDDEN)
    coverage = found.coverage
    assert coverage.flop == of_attention + 2 * of_product + of_head
    left = {part.module: part for part in coverage.left_out if part.flop}
    assert coverage.tuned_flop == coverage.flop - sum(part.flop for part in left.values())
    assert left["layers.*.mlp.down"] == LeftOut("layers.*.mlp.down", 3, of_product, CUT)
    assert left["head"] == LeftOut("head", 1, of_head, "outside of the layers that repeat")
    assert LeftOut("layers.*.mlp", 6, 0, CUT.removeprefix("cut off by ")) in coverage.left_out
    assert [part.flop for part in coverage.left_out] == sorted((p.flop for p in coverage.left_out), reverse=True)
    first, of_step, headline, *lines = str(found).splitlines()
    assert of_step == f"  their kernels were measured to take {found.graphs[0].tuned_us:,.0f} us of a training step"
    assert first.startswith("compiled graph 1: ")
    assert f"regions run tuned (1 of 1 kinds): {coverage.tuned_share:.0%} of the flop of the model's forward" in first
    assert headline == "  left out, heaviest first:"
    assert f"  {of_product / coverage.flop:>5.0%}  layers.*.mlp.down: {CUT}" in lines
    assert lines[-1].endswith("head: outside of the layers that repeat")


@pytest.mark.slow
def test_time_and_kept_bytes_of_plans_are_put_down_to_modules() -> None:
    model = Layered(unknown=False)
    compilation = Compilation(model)
    compilation.model(inputs(2, LENGTH))
    (graph,) = autotuner.summary(model).graphs
    planned = {part.module: part for part in graph.coverage.planned}
    plans = [region.plan for region in compilation.regions]
    assert sum(part.us for part in planned.values()) == pytest.approx(graph.tuned_us)
    assert (
        sum(part.kept_bytes for part in planned.values()) == sum(memory(plan.memory).held_bytes for plan in plans) > 0
    )
    whole = {f"layers.*{part}" for part in ("", ".attention", ".mlp")}
    own = {f"layers.*.attention.{part}" for part in ("norm", "query", "key", "value", "out")}
    assert planned.keys() <= whole | own | {f"layers.*.mlp.{part}" for part in ("norm", "up", "down")}
    norms = sum(
        step.predicted_us
        for plan in plans
        for step in plan.configuration.steps
        if step.phase == "forward" and step.operators and all(name.startswith("norm") for name in step.operators)
    )
    assert planned["layers.*.attention.norm"].us + planned["layers.*.mlp.norm"].us >= norms > 0


class Renamed(Known):
    """Knows every model under other names of operators and tensors, as a model file may have them."""

    def find(self, models: Iterable[Model], device_type: str) -> list[Configuration | None]:
        return super().find([renamed(model) for model in models], device_type)


def renamed(model: Model) -> Model:
    """Return a model with other names of its operators, and of what these make."""
    definition = dict(model.definition)
    names = {name: f"z_{name}" for each in definition["operators"] for name in (each["name"], *each["outputs"])}
    definition["operators"] = [
        {**each, "name": names[each["name"]], **{side: [names.get(t, t) for t in each[side]] for side in SIDES}}
        for each in definition["operators"]
    ]
    definition["outputs"] = [names[name] for name in definition["outputs"]]
    return replace(model, definition=definition)


@pytest.mark.slow
def test_a_plan_with_names_of_its_own_is_put_down_to_the_same_modules() -> None:
    found = []
    for knowledge in (Known(), Renamed()):
        model = Layered(unknown=False)
        compilation = compiled(model, knowledge)
        (graph,) = autotuner.summary(model).graphs
        found.append({part.module: (part.us, part.kept_bytes) for part in graph.coverage.planned})
        assert sum(us for us, _ in found[-1].values()) == pytest.approx(graph.tuned_us)
    assert "z_" in compilation.regions[0].plan.configuration.steps[0].operators[0]
    assert "layers.*.attention.norm" in found[0]
    assert found[1] == found[0]


@pytest.mark.slow
def test_nothing_is_known_of_the_time_of_what_is_not_tuned() -> None:
    model = Layered(unknown=False)
    compiled(model, Known([]))
    assert autotuner.summary(model).coverage.planned == ()


def test_operators_of_several_modules_are_of_the_innermost_that_holds_them_all() -> None:
    assert common_module(["layers.*.mlp.up", "layers.*.mlp.down"]) == "layers.*.mlp"
    assert common_module(["layers.*.mlp.up", "layers.*.mlp"]) == "layers.*.mlp"
    assert common_module(["layers.*.query", "layers.*.query_norm"]) == "layers.*"
    assert common_module(["head"]) == "head"
    assert common_module(["embedding", "head"]) == common_module([]) == ""


@pytest.mark.slow
def test_of_whole_layers_only_what_is_around_them_is_left_out() -> None:
    model = Layered(unknown=False)
    compiled(model)
    (graph,) = autotuner.summary(model).graphs
    assert [str(part) for part in graph.coverage.left_out] == ["head: outside of the layers that repeat"]
    assert graph.coverage.tuned_share > 0.95


@pytest.mark.slow
def test_what_is_not_tuned_yet_is_left_out_by_its_modules() -> None:
    model = Layered(unknown=False)
    compiled(model, Known([]))
    coverage = autotuner.summary(model).coverage
    assert coverage.tuned_flop == 0
    assert {part.reason for part in coverage.left_out} == {"not tuned", "outside of the layers that repeat"}
    assert sum(part.flop for part in coverage.left_out) == coverage.flop > 0


@pytest.mark.slow
def test_what_a_model_checkpoints_is_counted_and_runs_tuned() -> None:
    class Checkpointed(Layered):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer["mlp"], x, use_reentrant=False)  # type: ignore[index]
            return x

    model = Checkpointed(unknown=False)
    compiled(model)
    coverage = autotuner.summary(model).coverage
    assert coverage.flop == 3 * 2 * 2 * (2 * LENGTH * HIDDEN * WIDTH)
    assert coverage.tuned_flop == coverage.flop
    assert not [part for part in coverage.left_out if part.flop]


@pytest.mark.slow
def test_flop_are_those_that_torch_counts() -> None:
    model, x = Layered(unknown=True), inputs(2, LENGTH)
    counted: list[int] = []

    def look(module: torch.fx.GraphModule, _: object) -> object:
        counted.append(sum(call.flop for call in calls_of(module.graph)))
        return module.forward

    torch._dynamo.reset()
    torch.compile(model, backend=look, dynamic=False)(x)
    with (
        torch.utils.flop_counter.FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(x)
    assert counted == [counter.get_total_flops()]


@pytest.mark.slow
def test_nothing_to_tune_is_refused_with_what_is_left_out_and_why(tmp_path: Path) -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                y = layer(x)
                x = y.as_strided(y.shape, y.stride())
            return x

    torch._dynamo.reset()
    with pytest.raises(InputError) as told:
        autotuner.tune(Unknown(), [inputs(2, 3)], database=tmp_path / "none.sqlite")
    first, *lines = str(told.value).splitlines()
    assert first == "no region of this Unknown can be tuned; left out, heaviest first:"
    assert lines == [f" 100%  layers.*: {CUT}"]


def test_a_share_is_0_percent_only_of_nothing_and_100_only_of_everything() -> None:
    assert [percent(part, 1000) for part in (0, 1, 10, 990, 999, 1000)] == ["0%", "<1%", "1%", "99%", ">99%", "100%"]


def test_the_measured_share_of_a_step_is_said_where_it_can_be_true() -> None:
    share = StepShare(2000.0, 1240.0)
    assert (share.tuned_share, str(share)) == (0.62, "tuned regions take 1,240 of 2,000 us of a training step (62%)")
    assert "take 3,000 us, more than all of it: tune again, with remeasure=True" in str(StepShare(2000.0, 3000.0))


def test_many_parts_that_are_left_out_are_told_in_few_lines() -> None:
    parts = tuple(LeftOut(f"part{number}", 1, 10 - number, "strange") for number in range(10))
    lines = Coverage(100, 45, parts).lines
    assert lines[1] == "  10%  part0: strange"
    assert (len(lines), lines[-1]) == (8, "  10%  4 other parts")


@pytest.mark.slow
def test_a_training_step_says_what_share_of_its_measured_time_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layered(unknown=False)
    monkeypatch.setattr("autotuner.api.backend._knowledge", lambda _: Known())
    torch._dynamo.reset()
    step = autotuner.training_step(
        model, torch.optim.SGD(model.parameters(), lr=0.01), lambda model, x: model(x).square().mean(), compiler="eager"
    )
    for count in range(5):
        assert autotuner.summary(model).steps == () or count > 2
        step(inputs(2, LENGTH))
    found = autotuner.summary(model)
    (share,) = found.steps
    assert found.graphs[0].tuned_us > 0
    assert share.tuned_us == pytest.approx(found.graphs[0].tuned_us)
    assert share.tuned_share == share.tuned_us / share.step_us
    assert str(share) in str(found)
    assert str(share) in str(step)
    step(inputs(2, LENGTH), inputs(2, LENGTH))
    assert autotuner.summary(Layered(unknown=False)).steps == ()


def test_attention_of_a_tensor_with_itself_or_of_tensors_by_name_is_counted() -> None:
    counted: list[int] = []

    def look(module: torch.fx.GraphModule, _: object) -> object:
        counted.append(sum(call.flop for call in calls_of(module.graph)))
        return module.forward

    def attention(y: Tensor) -> tuple[Tensor, Tensor]:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(y, y, y), sdpa(query=y, value=y, key=y)

    torch._dynamo.reset()
    torch.compile(attention, backend=look, dynamic=False)(torch.randn(2, 3, 5, 4))
    assert counted == [2 * 2 * (2 * 3 * 5 * 5 * 4) * 2]


def test_equal_calls_of_other_graphs_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    counted: list[int] = []

    def noting(node: torch.fx.Node) -> None:
        ran.append(node.name)
        run_on_examples(node)

    def look(module: torch.fx.GraphModule, _: object) -> object:
        counted.append(sum(call.flop for call in calls_of(module.graph)))
        return module.forward

    monkeypatch.setattr("autotuner.runtime.capture.calls._shared", {})
    monkeypatch.setattr("autotuner.runtime.capture.calls.run_on_examples", noting)
    for rows in (2, 2, 3):
        torch._dynamo.reset()
        torch.compile(lambda x: x @ x.T, backend=look, dynamic=False)(torch.randn(rows, 5))
    assert counted == [2 * 2 * 2 * 5, 2 * 2 * 2 * 5, 2 * 3 * 3 * 5]
    assert len([name for name in ran if "matmul" in name]) == 2


@pytest.mark.slow
def test_a_call_whose_flop_cannot_be_counted_ends_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise ValueError("no strides")

    monkeypatch.setattr("autotuner.runtime.capture.calls._Counting._counted", fails)
    monkeypatch.setattr("autotuner.runtime.capture.calls._shared", {})
    model = Layered(unknown=False)
    compiled(model)
    assert autotuner.summary(model).coverage.flop == 0
