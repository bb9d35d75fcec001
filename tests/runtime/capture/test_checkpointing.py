"""Checkpoints as users write them, inside of compiled models and around them: selective, sequential, of wrappers, of
transformers; and torch's own budget for activations."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch._functorch import config
from torch.autograd import graph
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import autotuner
from autotuner.runtime import arena_memory
from autotuner.runtime.arena_memory import apart
from autotuner.runtime.capture.checkpointed import CapturedModule
from autotuner.runtime.capture.region_model import Region
from tests.runtime.capture.known import Compilation, Known, assert_equal, assert_is_slope, gradients
from tests.runtime.capture.test_backend import Adapted, inputs, loss_on, stored
from tests.runtime.capture.test_models import LAYERS, SMALL, bert, gpt2, llama, loss_of, padded_llama, tokens
from tests.runtime.capture.test_saved_tensors import COMPILERS, EXACT, STEPS, stages

aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.addmm.default]
REGION = torch.ops.autotuner.tuned_region.default


def products_kept(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def all_kept(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def nothing_kept(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def selecting(policy: Any) -> dict[str, Any]:
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, policy)}


# And how often a region runs in a step.
CHECKPOINTS: dict[str, tuple[dict[str, Any], int]] = {
    "reentrant": ({"use_reentrant": True}, 2),
    "policy": (selecting(products_kept), 2),
    "list": (selecting(PRODUCTS), 2),
    "list with regions": (selecting([*PRODUCTS, REGION]), 1),
    "all kept": (selecting(all_kept), 1),
    "nothing kept": (selecting(nothing_kept), 2),
}


class Inside(nn.Module):
    """Checkpoints each of its stages."""

    def __init__(self, stages: nn.Sequential, options: dict[str, Any]) -> None:
        super().__init__()
        self.stages, self.options = stages, options

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = checkpoint(stage, x, **self.options)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_checkpoint_inside_of_a_model_runs_tuned_regions_as_often_as_it_says(compiler: str, name: str) -> None:
    options, runs = CHECKPOINTS[name]
    model, x = Inside(stages(2), options), inputs(2, 3).double().requires_grad_()
    wanted = gradients(model, loss_on(x))
    compilation = Compilation(model, compiler=compiler)
    for _ in range(STEPS):
        assert_equal(gradients(model, loss_on(x), compilation.model), wanted, EXACT)
    assert [region.calls for region in compilation.regions] == [runs * STEPS] * 4
    drawing = Inside(stages(2, p=0.4), options)
    compilation = Compilation(drawing, compiler=compiler)
    assert_is_slope(lambda: loss_on(x)(compilation.model), drawing.get_parameter("stages.0.0.up.weight"))
    assert [region.calls for region in compilation.regions] == [runs + 2] * 4


class Widths(nn.Module):
    """Layers of one family, of several widths."""

    def __init__(self, *widths: int, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpoints = checkpoints
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16)) for width in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x))
        return x


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize(("widths", "tuned"), [((32, 48), 2), ((32,), 0)])
def test_layers_of_several_widths_are_regions_checkpointed_or_not(
    widths: tuple[int, ...], tuned: int, *, checkpoints: bool
) -> None:
    model, x = Widths(*widths, checkpoints=checkpoints).double(), torch.randn(2, 5, 16).double()
    compilation = Compilation(model, compiler="eager")
    found = gradients(model, lambda called: called(x).square().sum(), compilation.model)
    assert_equal(found, gradients(model, lambda called: called(x).square().sum()), EXACT)
    assert [region.calls for region in compilation.regions] == [1 + checkpoints] * tuned


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_regions_of_checkpoints_one_behind_the_other_have_the_memory_of_one_checkpoint(p: float) -> None:
    """Backward begins with the forward of the last checkpoint, from what the one before has handed on."""
    model, x = Inside(stages(4, p=p), {"use_reentrant": False}), inputs(2, 3).double().requires_grad_()
    wanted = gradients(model, loss_on(x))
    with apart():
        compilation = Compilation(model, compiler="inductor")
        for _ in range(STEPS):
            found = gradients(model, loss_on(x), compilation.model)
            if not p:
                assert_equal(found, wanted, EXACT)
        assert len(arena_memory._MADE.memories.alive()) == 2
    assert [region.calls for region in compilation.regions] == [2 * STEPS] * 8


@pytest.mark.parametrize("name", ["reentrant", "policy", "list"])
def test_a_checkpoint_of_what_nobody_tuned_draws_the_same_masks_call_by_call(name: str) -> None:
    options, _ = CHECKPOINTS[name]
    model, x = Inside(stages(2, p=0.4), options), inputs(2, 3).double()
    compilation = Compilation(model, Known([]), compiler="eager")
    assert_is_slope(lambda: loss_on(x)(compilation.model), model.get_parameter("stages.0.0.up.weight"))
    assert not compilation.regions


def told(options: dict[str, Any]) -> str:
    """Return what the summary says of a model with a selective checkpoint."""
    model, x = Inside(stages(2), options), inputs(2, 3).double()
    compilation = Compilation(model, compiler="aot_eager")
    gradients(model, loss_on(x), compilation.model)
    (compiled,) = compilation.compiled
    assert compiled.tuned_places == 4
    return str(compiled)


@pytest.mark.slow
def test_the_summary_says_what_is_done_with_a_policy_that_keeps_a_part_of_a_region() -> None:
    said = told(selecting(products_kept))
    assert "keeps 2 of the 5 results inside of each of 4 regions, and a region is one operator" in said
    assert "computed again as a whole; name the operator in the policy to keep it" in said
    assert "the policy has what it saves kept as a whole" in told(selecting([*PRODUCTS, REGION]))
    for policy in (all_kept, nothing_kept):
        assert "selective" not in told(selecting(policy))


def test_the_backend_keeps_a_region_that_a_users_list_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNER_SERVER", raising=False)
    monkeypatch.setenv("AUTOTUNER_DATABASE", str(tmp_path / "known.sqlite"))
    model, x = Inside(stages(2), selecting([*PRODUCTS, REGION])), inputs(2, 3).double()
    wanted = gradients(model, loss_on(x))
    stored(model, x, tmp_path / "known.sqlite")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="autotuner", options={"compiler": "aot_eager"}, dynamic=False)
    assert_equal(gradients(model, loss_on(x), compiled), wanted, EXACT)
    assert "4 of 4 regions run tuned" in str(autotuner.summary(model))
    assert "kept as a whole" in str(autotuner.summary(model))


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_checkpoint_around_compiled_stages_runs_them_tuned(compiler: str, name: str) -> None:
    options, _ = CHECKPOINTS[name]
    for p in (0.0, 0.4):
        model, x = stages(2, p=p), inputs(2, 3).double().requires_grad_()
        wanted = gradients(model, loss_on(x))
        compilation = Compilation(model[0], compiler=compiler)
        compiled = [torch.compile(stage, backend=compilation._compile, dynamic=False) for stage in model]

        def called(x: Tensor, compiled: Any = compiled, options: Any = options) -> Tensor:
            for stage in compiled:
                x = checkpoint(stage, x, **options)
            return x

        if p:
            assert_is_slope(lambda: loss_on(x)(called), model.get_parameter("0.0.up.weight"))  # noqa: B023
        else:
            assert_equal(gradients(model, loss_on(x), called), wanted, EXACT)
        assert compilation.regions
        assert all(region.calls for region in compilation.regions)


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_layers_of_a_sequential_checkpoint_run_tuned_where_they_are_compiled(use_reentrant: bool) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Adapted(1) for _ in range(4))).double()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint_sequential(self.layers, 2, x, use_reentrant=use_reentrant)  # type: ignore[no-untyped-call]
            return found

    torch.manual_seed(0)
    model, x = Layers(), inputs(2, 3).double().requires_grad_()
    wanted = gradients(model, loss_on(x))
    whole = Compilation(model, compiler="aot_eager")
    for _ in range(STEPS):
        assert_equal(gradients(model, loss_on(x), whole.model), wanted, EXACT)
    assert sum(region.calls for region in whole.regions) == STEPS * 2  # dynamo leaves what it checkpoints eager
    alone = Compilation(model, compiler="aot_eager")
    for layer in model.layers:
        layer.compile(backend=alone._compile, dynamic=False)
    for _ in range(STEPS):
        assert_equal(gradients(model, loss_on(x)), wanted, EXACT)
    assert sum(region.calls for region in alone.regions) == STEPS * (4 + 2)


def wrapped(implementation: CheckpointImpl, model: Any, **options: Any) -> None:
    layer = type(next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0])
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=implementation, **options),
        check_fn=lambda module: isinstance(module, layer),
    )


ENABLED: dict[str, Callable[[Any], Any]] = {
    "reentrant": lambda m: m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True}),
    "not reentrant": lambda m: m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}),
    "selective": lambda m: m.gradient_checkpointing_enable(gradient_checkpointing_kwargs=selecting(PRODUCTS)),
    "new name": lambda m: m.activation_checkpointing_enable(),
    "wrapper": lambda m: wrapped(CheckpointImpl.NO_REENTRANT, m),
    "reentrant wrapper": lambda m: wrapped(CheckpointImpl.REENTRANT, m),
    "selective wrapper": lambda m: wrapped(
        CheckpointImpl.NO_REENTRANT, m, context_fn=selecting(PRODUCTS)["context_fn"]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENABLED)
@pytest.mark.parametrize("make", [bert, llama])
def test_models_that_checkpoint_their_layers_run_them_tuned_twice(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], name: str
) -> None:
    torch.manual_seed(0)
    model, arguments = make()
    loss = loss_of(arguments)
    model.double()
    if name == "new name" and not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("this version of transformers has the old name only")
    ENABLED[name](model)
    wanted = gradients(model, loss)
    compilation = Compilation(model, compiler="aot_eager")
    assert_equal(gradients(model, loss, compilation.model), wanted, EXACT)
    assert [region.calls for region in compilation.regions] == [2] * LAYERS


def dropping_bert() -> tuple[nn.Module, dict[str, Any]]:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)), tokens()


@pytest.mark.slow
@pytest.mark.parametrize("make", [dropping_bert, gpt2, llama, padded_llama])
def test_a_layer_is_the_same_region_checkpointed_or_not(make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    torch.manual_seed(0)
    model, arguments = make()
    found = []
    for enable in (lambda _: None, ENABLED["not reentrant"]):
        enable(model)
        found.append([region.key for region in regions_in(model, loss_of(arguments))])
    assert len(found[0]) == LAYERS
    assert found[0] == found[1]


def regions_in(
    model: nn.Module, call: Callable[[Any], Any], change: Callable[[fx.GraphModule], None] | None = None
) -> list[Region]:
    """Return the regions of a model's call; `change`: is given what dynamo made of it before it is read."""
    found: list[Region] = []

    def read(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        if change is not None:
            change(module)
        found.extend(CapturedModule(module).regions)
        return module.forward

    torch._dynamo.reset()
    call(torch.compile(model, backend=read, dynamic=False))
    return found


class Seeing(nn.Module):
    """Checkpoints layers of attention, which are given what they see."""

    def __init__(self, *masks: Callable[[int], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masks = masks
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in masks)

    def forward(self, x: Tensor) -> Tensor:
        for layer, mask in zip(self.layers, self.masks, strict=True):
            x = x + checkpoint(attended, layer, x, mask(x.shape[1]), use_reentrant=False)
        return x


def attended(layer: nn.Linear, x: Tensor, mask: Tensor) -> Tensor:
    heads = layer(x).unflatten(-1, (2, 8)).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads, mask).transpose(1, 2).flatten(2)


def everything(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool)


def behind(length: int) -> Tensor:
    return everything(length).tril()


def near(length: int) -> Tensor:
    return behind(length).triu(-2)


@pytest.mark.parametrize(
    ("masks", "inputs"), [((everything, behind), [1, 1]), ((behind, everything), [1, 1]), ((near, behind), [3, 1])]
)
def test_a_mask_that_a_model_makes_from_nothing_is_known_in_what_it_checkpoints(
    masks: tuple[Callable[[int], Tensor], ...], inputs: list[int]
) -> None:
    model, x = Seeing(*masks).double(), torch.randn(2, 5, 16).double()
    compilation = Compilation(model)
    found = gradients(model, lambda called: called(x).square().sum(), compilation.model)
    assert_equal(found, gradients(model, lambda called: called(x).square().sum()), EXACT)
    assert [len(region.plan.ports.inputs) for region in compilation.regions] == inputs


def test_a_body_that_is_called_twice_takes_neither_calls_mask_for_known() -> None:
    def call_one_twice(module: fx.GraphModule) -> None:
        first, second = (node for node in module.graph.nodes if "checkpoint" in str(node.target))
        second.args = (first.args[0], *second.args[1:])

    (region,) = regions_in(Seeing(everything, behind), lambda called: called(torch.randn(2, 5, 16)), call_one_twice)
    assert len(region.inputs) == 3  # beside what is seen, for which rows nothing is


@pytest.mark.slow
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize(("budget", "compiler"), [(0.0, "aot_eager"), (0.5, "aot_eager"), (0.9, "inductor")])
def test_a_budget_for_activations_repeats_regions_with_the_same_masks(
    compiler: str, budget: float, is_checkpointed: bool
) -> None:
    x = inputs(2, 3).double()
    for p in (0.0, 0.4):
        model = Inside(stages(2, p=p), {"use_reentrant": False}) if is_checkpointed else stages(2, p=p)
        weight = next(each for name, each in model.named_parameters() if name.endswith("0.0.up.weight"))
        wanted = gradients(model, loss_on(x))
        with config.patch(activation_memory_budget=budget):
            compilation = Compilation(model, compiler=compiler)
            if p:
                assert_is_slope(lambda: loss_on(x)(compilation.model), weight)  # noqa: B023
            else:
                assert_equal(gradients(model, loss_on(x), compilation.model), wanted, EXACT)
        assert all(region.calls for region in compilation.regions)


@pytest.mark.skipif(not hasattr(graph, "region_activation_memory_budget"), reason="torch 2.11 has no such note")
def test_a_budget_noted_in_the_model_repeats_regions_with_the_same_masks() -> None:
    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = stages(2, p=0.4)

        def forward(self, x: Tensor) -> Tensor:
            with graph.region_activation_memory_budget(0.5):
                found: Tensor = self.stages(x)
            return found

    model, x = Noted(), inputs(2, 3).double()
    compilation = Compilation(model, compiler="aot_eager")
    assert_is_slope(lambda: compilation.model(x).square().mean(), model.get_parameter("stages.0.0.up.weight"))
    assert [region.calls for region in compilation.regions] == [2 + 2] * 4
