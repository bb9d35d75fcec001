"""One layer for inputs of several shapes, each with a configuration of its own."""

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotuner
from autotuner.api.layers import as_model
from autotuner.errors import ConfigurationError, InputError
from autotuner.ir.models import load_model
from autotuner.plan.configuration import Configuration, save_configuration
from autotuner.runtime import TunedModule, TunedWarning, apply
from autotuner.runtime.framework import encoder_layer
from tests.runtime.layers import CUDA, assert_equal, gradients
from tests.runtime.plans import SITES, TINY, WITH_DROPOUT, configuration, model

SHORT, LONG = TINY | {"b": 3, "l": 4}, TINY
STEPS = 4
devices = pytest.mark.parametrize(
    ("device", "graphs"),
    [("cpu", False), *(pytest.param(CUDA, graphs, marks=pytest.mark.gpu) for graphs in (True, False))],
)


def configurations(device: str = "cpu", **options: Any) -> list[Configuration]:
    """Return a plan for each shape."""
    return [configuration(model(extents, **options), seed, device) for extents, seed in ((SHORT, 1), (LONG, 2))]


def pair(device: str = "cpu", graphs: bool = True, **options: Any) -> tuple[TunedModule, nn.Module]:
    """Return a layer with two configurations, and an untouched copy of what it was made from."""
    layer = encoder_layer(model(**options), 0, device)
    twin = copy.deepcopy(layer)
    tuned = apply(layer, configurations(device, **options), graphs=graphs)
    assert isinstance(tuned, TunedModule)
    return tuned, twin


def inputs(seed: int, device: str = "cpu") -> list[Tensor]:
    """Return an input of each shape."""
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(extents["b"], extents["l"], extents["h"], generator=draw, dtype=torch.float64).to(device)
        for extents in (SHORT, LONG)
    ]


@pytest.mark.slow
@devices
def test_calls_of_either_shape_train_as_the_framework_does(device: str, graphs: bool) -> None:
    layer, twin = pair(device, graphs)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in (layer, twin)]
    for step in range(STEPS):
        for x in inputs(step, device):
            assert_equal(gradients(layer, x), gradients(twin, x), 1e-10)
            for optimizer in optimizers:
                optimizer.step()
    assert (layer.calls, dict(layer.fallbacks)) == (2 * STEPS, {})


@pytest.mark.slow
@devices
def test_gradients_of_both_shapes_add_up_and_are_contiguous(device: str, graphs: bool) -> None:
    layer, twin = pair(device, graphs)
    for step in range(STEPS):
        for module in (layer, twin):
            module.zero_grad()
            sum(module(x).square().sum() for x in inputs(step, device)).backward()
        found, wanted = (
            {name: p.grad for name, p in module.named_parameters() if p.grad is not None} for module in (layer, twin)
        )
        assert_equal(found, wanted, 1e-10)
        assert all(p.grad is not None and p.grad.stride() == p.stride() for p in layer.parameters())


@pytest.mark.slow
@devices
def test_masks_over_keys_of_either_shape_are_taken(device: str, graphs: bool) -> None:
    layer, twin = pair(device, graphs, attention_mask=True)
    for x in inputs(0, device):
        mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=device)
        mask[0, -1] = True
        for arguments in ({"src_key_padding_mask": mask}, {}):
            assert_equal(gradients(layer, x, **arguments), gradients(twin, x, **arguments), 1e-10)
    assert not layer.fallbacks


@pytest.mark.slow
def test_a_third_shape_runs_the_original_and_the_warning_names_those_that_were_tuned() -> None:
    layer, twin = pair()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    with pytest.warns(TunedWarning, match=r"shape is \(1, 6, 8\), and it was tuned for \(3, 4, 8\) and \(2, 6, 8\)"):
        assert_equal(gradients(layer, x), gradients(twin, x))
    assert dict(layer.fallbacks) == {"shape": 1}


@pytest.mark.slow
def test_a_copy_and_an_unpickled_layer_run_both_shapes() -> None:
    layer, twin = pair()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        for x in inputs(0):
            assert_equal(gradients(other, x), gradients(twin, x), 1e-10)
        assert other.calls == 2


@pytest.mark.slow
def test_parameters_that_were_replaced_are_followed_by_the_shape_that_is_called_next() -> None:
    layer, _ = pair()
    fresh = encoder_layer(model(), 5)
    layer.load_state_dict(copy.deepcopy(fresh.state_dict()), assign=True)
    short, long = inputs(0)
    assert_equal(gradients(layer, long), gradients(fresh, long), 1e-10)
    assert_equal(gradients(layer, short), gradients(fresh, short), 1e-10)
    assert_equal(gradients(layer, long), gradients(fresh, long), 1e-10)
    assert layer.calls == 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@devices
def test_in_a_compiled_model_both_shapes_run_tuned(device: str, graphs: bool, backend: str) -> None:
    torch.compiler.reset()
    layer, twin = pair(device, graphs)
    compiled: Any = torch.compile(nn.Sequential(layer), backend=backend, fullgraph=True)
    for step in range(STEPS):
        for x in inputs(step, device):
            found = gradients(compiled, x)
            assert_equal(
                {n.removeprefix("_orig_mod."): g for n, g in found.items()}, gradients(nn.Sequential(twin), x), 1e-10
            )
    assert (layer.calls, dict(layer.fallbacks)) == (2 * STEPS, {})


@pytest.mark.slow
def test_dropout_draws_of_either_shape_are_those_of_the_generators_seed() -> None:
    layer, _ = pair(p=WITH_DROPOUT)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append([layer(x) for x in inputs(0)])
    assert all(torch.equal(one, other) for one, other in zip(runs[0], runs[1], strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(runs[0], runs[2], strict=True))


@pytest.mark.slow
def test_train_and_eval_mode_each_run_their_own_configuration() -> None:
    layer = encoder_layer(model(p=WITH_DROPOUT))
    twin = copy.deepcopy(layer).eval()
    made: Any = apply(layer, [configuration(model(p=WITH_DROPOUT)), configuration(model())])
    x = inputs(0)[1]
    assert not torch.equal(made(x), made(x))
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(made.eval()(x), twin(x), rtol=1e-10, atol=1e-10)
        made.train()(x).sum().backward()
    assert (made.calls, dict(made.fallbacks)) == (6, {})


def test_a_module_is_tuned_for_eval_mode_without_dropout() -> None:
    layer = encoder_layer(model(p=WITH_DROPOUT))
    found = {mode: as_model(layer, {"b": 2, "l": 6}, None, None, mode).options for mode in ("train", "eval")}
    assert {found["train"][site] for site in SITES} == {WITH_DROPOUT}
    assert {found["eval"][site] for site in SITES} == {0.0}
    with pytest.raises(InputError, match='mode is \'test\': give "train" or "eval"'):
        autotuner.tune(layer, extents={"b": 2, "l": 6}, mode="test")
    with pytest.raises(InputError, match="has no mode: set the options of its dropout to 0, or give a module"):
        autotuner.tune("bert-encoder:tiny", mode="eval")


@pytest.mark.slow
def test_a_configuration_for_eval_mode_alone_is_for_a_layer_in_eval_mode() -> None:
    layer = encoder_layer(model(p=WITH_DROPOUT))
    with pytest.raises(
        ConfigurationError, match=r"for eval mode: give it beside one for training, apply\(layer, \[train"
    ):
        apply(layer, configuration(model()))
    twin = copy.deepcopy(layer).eval()
    made: Any = apply(layer.eval(), configuration(model()))
    with torch.no_grad():
        torch.testing.assert_close(made(inputs(0)[1]), twin(inputs(0)[1]), rtol=1e-10, atol=1e-10)
    with pytest.warns(TunedWarning, match="in train mode"):
        made.train()(inputs(0)[1])
    assert (made.calls, dict(made.fallbacks)) == (1, {"settings": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no configuration is given"),
        (
            [(LONG, {}), (SHORT, {}), (LONG, {})],
            "2 configurations are for b=2 l=6 without dropout: give one for each shape, mode",
        ),
        ([(LONG, {}), (SHORT | {"f": 16}, {})], "number 2 of 2: .* extent f is 12, the configuration's 16"),
    ],
)
def test_configurations_that_cannot_share_a_layer_are_refused(
    given: list[tuple[dict[str, int], dict[str, Any]]], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        apply(encoder_layer(model()), [configuration(model(extents, **options)) for extents, options in given])


def test_a_configuration_of_another_model_is_refused_as_one() -> None:
    other = replace(configuration(model()), model=load_model("gpt-block").instantiate(extents=TINY, dtype="float64"))
    for given in (other, [configuration(model()), other]):
        with pytest.raises(ConfigurationError, match="model is 'bert-encoder', the configuration's 'gpt-block'"):
            apply(encoder_layer(model()), given)


@pytest.mark.slow
def test_files_of_several_shapes_can_be_given(tmp_path: Path) -> None:
    paths = [tmp_path / "short.json", tmp_path / "long.json"]
    for path, found in zip(paths, configurations(), strict=True):
        save_configuration(found, path)
    layer = autotuner.apply(encoder_layer(model()), paths)
    for x in inputs(0):
        layer(x)
    assert isinstance(layer, TunedModule)
    assert layer.calls == 2
