"""The backend of torch.compile: what it leaves alone, what it says, and the promises of torch.compile that it keeps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autotuner
from autotuner.api import backend, knowledge
from autotuner.api.backend import COMPILED, compile_graph
from autotuner.api.knowledge import OfDatabase
from autotuner.api.options import checked
from autotuner.api.survey import region_calls
from autotuner.database import open_database
from autotuner.errors import InputError, TunedWarning
from autotuner.ir.numerics import Numerics
from autotuner.kernels.torch import programmed
from autotuner.measure.devices import environment
from autotuner.plan.configuration import Configuration
from autotuner.plan.parts import Memory
from autotuner.plan.request import family_key
from autotuner.runtime.framework import encoder_layer
from tests.runtime.capture.known import Compilation, Known, assert_equal, gradients, planned
from tests.runtime.plans import configuration
from tests.runtime.plans import model as encoder_model

HIDDEN = 16


class Block(nn.Module):
    """A pre-norm feed-forward part; two of them are the smallest model that has a region."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(functional.gelu(self.up(self.norm(x))))
        return x + functional.dropout(y, self.p, self.training)


def blocks(count: int = 2, p: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(p) for _ in range(count)))


def loss_on(x: Tensor) -> Callable[[Any], Tensor]:
    def loss(model: Any) -> Tensor:
        found: Tensor = model(x).square().mean()
        return found

    return loss


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(1))


def check_equal(model: nn.Module, x: Tensor, tuned: int, compilation: Compilation) -> None:
    wanted = gradients(model, loss_on(x))
    assert_equal(gradients(model, loss_on(x), compilation.model), wanted, 2e-6)
    assert sum(graph.tuned_places for graph in compilation.compiled) == tuned


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_regions_run_inside_of_what_another_compiler_makes(compiler: str) -> None:
    model = blocks()
    check_equal(model, inputs(2, 3), 2, Compilation(model, compiler=compiler))


def test_equal_layers_have_one_plan_and_each_its_own_call() -> None:
    model = blocks(4)
    compilation = Compilation(model)
    check_equal(model, inputs(2, 3), 4, compilation)
    assert len({id(region.plan) for region in compilation.regions}) == 1
    assert [region.calls for region in compilation.regions] == [1] * 4


def test_each_shape_is_a_graph_of_its_own() -> None:
    model = blocks()
    compilation = Compilation(model)
    for shape in ((2, 3), (4, 5), (2, 3)):
        wanted = gradients(model, loss_on(inputs(*shape)))
        assert_equal(gradients(model, loss_on(inputs(*shape)), compilation.model), wanted, 2e-6)
    assert len(compilation.compiled) == 2
    assert [region.calls for region in compilation.regions] == [2, 2, 1, 1]


class Adapted(nn.Module):
    """An attention over sums of products, as adapters make them; `parts` is how finely a summand is split besides."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.base, self.low, self.parts = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False), parts

    def forward(self, x: Tensor) -> Tensor:
        base, low = self.base(x), self.low(x)
        weights = low.view(2, 3, self.parts, -1).softmax(-1).view(2, 3, HIDDEN)
        query, key, value = (each.view(2, 3, 4, 4).transpose(1, 2) for each in (base + low, base, low + weights))
        return x + functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(2, 3, HIDDEN)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients_of_programs_are_made_while_compiled_code_runs(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programmed, "_TRACED", {})  # as in a new process
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(1), Adapted(1))
    check_equal(model, inputs(2, 3), 2, Compilation(model, compiler=compiler))
    assert programmed._TRACED


@pytest.mark.parametrize("parts", [1, 4])  # what splits the axis of a softmax is a program
def test_what_is_added_and_then_split_into_heads_is_split_alike(parts: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(parts), Adapted(parts))
    check_equal(model, inputs(2, 3), 2, Compilation(model))


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (5,)])
def test_a_dimension_of_one_element_is_as_good_as_none(shape: tuple[int, ...]) -> None:
    model = blocks()
    check_equal(model, inputs(*shape), 2, Compilation(model))


def test_frozen_parameters_get_no_gradients() -> None:
    model = blocks()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down" in name)
    check_equal(model, inputs(2, 3), 2, Compilation(model))


def test_one_weight_in_two_layers_gets_the_sum_of_both_gradients() -> None:
    model = blocks()
    model.get_submodule("1.up").weight = model.get_submodule("0.up").weight
    check_equal(model, inputs(2, 3), 2, Compilation(model))


def test_without_gradients_it_only_runs_forward() -> None:
    model = blocks()
    compilation = Compilation(model)
    with torch.no_grad():
        assert torch.allclose(compilation.model(inputs(2, 3)), model(inputs(2, 3)), atol=1e-6)
    assert [region.calls for region in compilation.regions] == [1, 1]


def test_dropout_draws_in_train_mode_and_not_in_eval_mode() -> None:
    model, x = blocks(p=0.5), inputs(8, 16)
    compilation = Compilation(model)
    first, second = compilation.model(x), compilation.model(x)
    assert not torch.equal(first, second)
    model.eval()
    assert torch.allclose(compilation.model(x), model(x), atol=1e-6)


def test_a_graph_break_makes_two_graphs() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = blocks(), blocks()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)  # type: ignore[no-any-return]

    model = Broken()
    compilation = Compilation(model)
    check_equal(model, inputs(2, 3), 4, compilation)
    assert len(compilation.compiled) == 2


def test_layers_that_are_checkpointed_inside_of_a_model_run_tuned() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.first, self.second):
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = Checkpointed()
    check_equal(model, inputs(2, 3), 2, Compilation(model, compiler="aot_eager"))


class Changing(nn.Module):
    """Changes in place what the layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        y: Tensor = self.first(x)
        x.add_(1.0)
        for layer in (self.second, self.third):
            y = layer(y) + x
        return y


def test_what_is_changed_in_place_is_read_as_torch_reads_it() -> None:
    model, x = Changing(), inputs(2, 3)
    compilation = Compilation(model)
    with torch.no_grad():
        assert torch.allclose(compilation.model(x), model(x), atol=1e-6)


def test_results_between_layers_can_be_read() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = blocks(3)

        def forward(self, x: Tensor) -> Tensor:
            states = []
            for layer in self.layers:
                x = layer(x)
                states.append(x.transpose(0, 1).flatten())
            return torch.cat(states).cumsum(0)

    model = Between()
    check_equal(model, inputs(2, 3), 3, Compilation(model))


def test_gradients_are_accumulated_and_the_optimizer_moves_the_parameters_that_regions_read() -> None:
    ours, theirs = blocks(), blocks()
    compilation = Compilation(ours)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in (ours, theirs)]
    for _ in range(3):
        for called, optimizer in zip((compilation.model, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            for number in range(2):
                loss_on(inputs(2, 3) * (number + 1))(called).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(own, other, atol=1e-4)


def test_what_is_not_known_is_asked_for_and_runs_as_before() -> None:
    model, known = blocks(), Known([])
    compilation = Compilation(model, known)
    check_equal(model, inputs(2, 3), 0, compilation)
    assert [model.name for model in known.wanted] == [next(iter(compilation.compiled[0].regions))]
    headline, _, *lines = str(compilation.compiled[0]).splitlines()
    assert headline == (
        "0 of 2 regions run tuned (0 of 1 kinds): 0% of the flop of the model's forward; "
        "for the others, somebody tunes them"
    )
    assert lines == ["    50%  *.down: not tuned", "    50%  *.up: not tuned"]


@pytest.mark.parametrize("cuts", [True, False])
def test_where_ddp_cuts_the_graph_it_is_said_what_keeps_layers_whole(
    cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    active = "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module"
    model = blocks()
    compilation = Compilation(model, Known(()))
    monkeypatch.setattr("autotuner.api.backend._is_cut_by_ddp", lambda: cuts)
    gradients(model, loss_on(inputs(2, 3)), compilation.model)
    (graph,) = compilation.compiled
    assert ("torch._dynamo.config.optimize_ddp = False keeps them whole" in graph.note) is cuts
    monkeypatch.undo()
    assert not backend._is_cut_by_ddp()
    monkeypatch.setattr(active, lambda: object())
    assert backend._is_cut_by_ddp()
    with torch._dynamo.config.patch(optimize_ddp=False):
        assert not backend._is_cut_by_ddp()


def stored(model: nn.Module, x: Any, path: Path) -> Configuration:
    """Store a plan of a model's one region, and return it."""
    (region,) = region_calls(model, [x]).models.values()
    found = planned(region)
    with open_database(path) as database:
        from autotuner.measure.devices import environment

        here = environment("cpu")
        database.remember(here)
        database.configurations.save(
            request_key="key", environment_key=here.key, family_key=family_key(region.family), dtype=region.dtype,
            extents=region.extents, complete=True, document=found.to_json(), total_us=1.0,
        )  # fmt: skip
    return found


def test_a_model_runs_what_the_database_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNER_SERVER", raising=False)
    model, x = blocks(), inputs(2, 3)
    stored(model, x, tmp_path / "known.sqlite")
    torch._dynamo.reset()
    compiled = autotuner.optimize(model, database=tmp_path / "known.sqlite", compiler="eager")
    wanted = gradients(model, loss_on(x))
    assert_equal(gradients(model, loss_on(x), compiled), wanted, 2e-6)
    assert "2 of 2 regions run tuned (1 of 1 kinds)" in str(autotuner.summary())


def test_what_was_tuned_with_8_bits_allowed_is_found_only_where_they_are(tmp_path: Path) -> None:
    model, x, path = blocks(), inputs(2, 3), tmp_path / "known.sqlite"
    found = stored(model, x, path)
    (region,) = region_calls(model, [x]).models.values()

    def known(numerics: Numerics) -> list[str]:
        return [each.numerics for each in OfDatabase(path, numerics).find([region], "cpu") if each is not None]

    assert (known("exact"), known("8-bit")) == (["exact"], ["exact"])
    with open_database(path) as database:
        database.configurations.save(
            request_key="other", environment_key=environment("cpu").key, dtype=region.dtype, extents=region.extents,
            family_key=family_key(region.family, numerics="8-bit"), complete=True, total_us=1.0,
            document=replace(found, numerics="8-bit").to_json(),
        )  # fmt: skip
    assert (known("exact"), known("8-bit")) == (["exact"], ["8-bit"])


def test_what_was_tuned_under_a_budget_is_found_with_that_budget_and_run(tmp_path: Path) -> None:
    model, x, path = blocks(), inputs(2, 3), tmp_path / "known.sqlite"
    found = stored(model, x, path)
    (region,) = region_calls(model, [x]).models.values()
    with open_database(path) as database:
        database.configurations.save(
            request_key="other", environment_key=environment("cpu").key, dtype=region.dtype, extents=region.extents,
            family_key=family_key(region.family, 2**20), complete=True, total_us=1.0,
            document=replace(found, memory=Memory(2**20, 1, 1)).to_json(),
        )  # fmt: skip

    def budgets(budget_bytes: int | None) -> list[int | None]:
        known = OfDatabase(path, budget_bytes=budget_bytes).find([region], "cpu")
        return [each.budget_bytes for each in known if each is not None]

    assert (budgets(None), budgets(2**20), budgets(2**21)) == ([None], [2**20], [])
    wanted = gradients(model, loss_on(x))
    for budget_bytes, places in ((2**20, 2), (2**21, 0)):
        torch._dynamo.reset()
        compiled = autotuner.optimize(model, database=path, compiler="eager", budget_bytes=budget_bytes)
        assert_equal(gradients(model, loss_on(x), compiled), wanted, 2e-6)
        assert COMPILED[-1].tuned_places == places
    assert COMPILED[-1].note == "autotuner.tune(model, example_inputs=..., budget_bytes=2097152) tunes them"
    checked({"budget_bytes": "1GiB"})
    with pytest.raises(InputError, match="budget_bytes 'much': write a number of bytes, or one with a unit, such as"):
        checked({"budget_bytes": "much"})
    with pytest.raises(InputError, match=r"the budget is '1GiB': give a number of bytes, such as 2\*\*30, or none"):
        autotuner.optimize(model, budget_bytes="1GiB")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="budget_bytes is 0: write a number above 0, or leave it out"):
        checked({"budget_bytes": 0})


def test_a_model_runs_configurations_that_are_given_and_says_which_region_has_none(tmp_path: Path) -> None:
    model, x = blocks(), inputs(2, 3)
    (region,) = region_calls(model, [(x,)]).models.values()
    given = planned(region)
    autotuner.save_configuration(given, tmp_path / "block.json")
    wanted = gradients(model, loss_on(x))
    for each in (tmp_path / "block.json", [given]):
        torch._dynamo.reset()
        compiled = autotuner.optimize(model, configurations=each, compiler="eager")
        assert_equal(gradients(model, loss_on(x), compiled), wanted, 2e-6)
        assert COMPILED[-1].tuned_places == 2
    gradients(model, loss_on(inputs(4, 5)), compiled)
    assert COMPILED[-1].tuned_places == 0
    assert COMPILED[-1].note == (
        "the configuration that was given is not for this computation, in these shapes and types"
    )


def test_layers_of_a_model_run_a_configuration_of_a_model_file() -> None:
    """As a service has them, of `bert-encoder`, say: tensors and operators have other names there."""
    known = encoder_model()
    model = nn.Sequential(*(encoder_layer(known, seed) for seed in range(2)))
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    wanted = gradients(model, loss_on(x))
    torch._dynamo.reset()
    given = configuration(known)
    compiled = autotuner.optimize(model, configurations=given, compiler="eager")
    assert_equal(gradients(model, loss_on(x), compiled), wanted, 1e-12)
    assert (COMPILED[-1].tuned_places, COMPILED[-1].note) == (2, "")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = autotuner.training_step(
        model, optimizer, lambda model, x: model(x).square().mean(), configurations=given, compiler="eager"
    )
    torch.testing.assert_close(step(x), wanted["loss"])
    assert COMPILED[-1].tuned_places == 2


def test_example_inputs_beside_configurations_are_refused_since_nobody_would_look_at_what_is_tuned() -> None:
    model, x = blocks(), inputs(2, 3)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(InputError, match="nothing is tuned beside configurations that are given: give example inputs"):
        autotuner.optimize(model, (x,), configurations=[])
    with pytest.raises(InputError, match="nothing is tuned beside configurations that are given: give example inputs"):
        autotuner.training_step(model, optimizer, example_inputs=(x,), configurations=[])


def test_configurations_of_another_device_run_with_a_warning() -> None:
    model, x = blocks(), inputs(2, 3)
    (region,) = region_calls(model, [(x,)]).models.values()
    given = planned(region)
    moved = replace(given, environment={**given.environment, "device_name": "an abacus"})
    torch._dynamo.reset()
    compiled = autotuner.optimize(model, configurations=moved, compiler="eager")
    with pytest.warns(TunedWarning, match="tuned on another device, an abacus, and may not be the fastest on "):
        compiled(x)
    assert COMPILED[-1].tuned_places == 2
    with pytest.raises(InputError, match="7 is no configuration: give one, the path of its file, or a list of these"):
        knowledge.loaded(7)  # type: ignore[arg-type]


def test_the_backend_is_found_by_name() -> None:
    assert "autotuner" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("autotuner") is compile_graph


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"compilr": "eager"},
            "the backend has no option 'compilr'; it has budget, budget_bytes, capture, compiler, configurations, data",
        ),
        ({"capture": "forward"}, "capture is 'forward': write \"step\", or leave it out"),
        ({"compiler": "nvcc"}, "compiler is 'nvcc': write one of inductor, aot_eager, eager"),
        ({"server": "http://127.0.0.1:1", "database": "x"}, "a server and a database"),
        ({"configurations": [], "database": "x"}, "a database and configurations: give one of them"),
    ],
)
def test_options_that_are_not_valid_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        checked(options)


def test_a_module_without_regions_is_refused_with_the_reason() -> None:
    torch._dynamo.reset()
    with pytest.raises(InputError, match="can be tuned; left out, heaviest first:\n 100%  the model itself: nothing"):
        autotuner.tune(nn.Linear(4, 4), [torch.randn(2, 4)])


class Uncompiled(nn.Linear):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_module_that_torch_makes_no_graph_of_is_refused_with_the_reason() -> None:
    torch._dynamo.reset()
    with pytest.raises(InputError, match=r'can be tuned: torch made no graph of it, .*TORCH_LOGS="graph_breaks" tells'):
        autotuner.tune(Uncompiled(4, 4), [torch.randn(2, 4)])


@pytest.mark.slow
def test_a_padded_encoder_of_torchs_runs_tuned_as_it_is_typed(tmp_path: Path) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 2)
    batch = {"src": torch.randn(2, 3, 8), "src_key_padding_mask": torch.tensor([[False] * 3, [False, True, True]])}
    stored(model, batch, tmp_path / "known.sqlite")
    (region,) = autotuner.regions(model, [batch], database=tmp_path / "known.sqlite").regions
    assert (region.runs, region.known is not None) == (2, True)
    options: dict[str, Any] = {"database": str(tmp_path / "known.sqlite"), "compiler": "eager"}
    compiled = torch.compile(model, backend="autotuner", options=options)
    torch.testing.assert_close(compiled(**batch), model(**batch))
    first, *_ = str(autotuner.summary(model)).splitlines()
    assert first == "compiled graph 1: 2 of 2 regions run tuned (1 of 1 kinds): 100% of the flop of the model's forward"


def test_arguments_that_do_not_go_with_example_inputs_are_refused() -> None:
    with pytest.raises(InputError, match="'bert-encoder:tiny' is none"):
        autotuner.tune("bert-encoder:tiny", [torch.zeros(1)])  # type: ignore[call-overload]
    with pytest.raises(InputError, match="follow from the example inputs"):
        autotuner.tune(blocks(), [inputs(2, 3)], dtype="float32")  # type: ignore[call-overload]
    with pytest.raises(InputError, match="give example inputs or a server"):
        autotuner.optimize(blocks(), [inputs(2, 3)], server="http://127.0.0.1:1")
