"""Modules of model files: parameters by their names, tuned calls, and plain ones where no configuration fits."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import autotuner
from autotuner.errors import ConfigurationError, InputError
from autotuner.ir.models import load_model
from autotuner.plan.configuration import save_configuration
from tests.runtime.plans import WITH_DROPOUT, configuration, model
from tests.runtime.regions import SHARED, shared_model

pytestmark = pytest.mark.slow


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def outcome(module: Any, *inputs: Tensor) -> list[Tensor]:
    """Return outputs and the gradients of all parameters."""
    module.zero_grad()
    outputs = module(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward([sum(each.square().sum() for each in outputs)])
    return [*outputs, *(p.grad for p in module.parameters())]


def plain(module: Any, *inputs: Tensor) -> list[Tensor]:
    """Return the same without configurations."""
    twin = copy.deepcopy(module)
    twin._regions = {}
    return outcome(twin, *inputs)


def calls() -> tuple[int, int]:
    found = autotuner.summary()
    return found.calls, found.fallbacks.total()


def test_a_model_file_becomes_a_module_that_runs_its_configuration() -> None:
    of = model()
    module = autotuner.module([configuration(of, 0)])
    assert list(module.state_dict()) == list(of.definition["parameters"])
    before = calls()
    torch.testing.assert_close(outcome(module, x_of(2, 6, 8)), plain(module, x_of(2, 6, 8)))
    assert [now - then for now, then in zip(calls(), before, strict=True)] == [1, 1]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        losses.append(float(outcome(module, x_of(2, 6, 8))[0].square().sum().detach()))
        optimizer.step()
    assert losses[-1] < losses[0]


def test_a_definition_with_several_inputs_and_outputs_is_a_module(tmp_path: Any) -> None:
    path = tmp_path / "shared.json"
    save_configuration(configuration(shared_model(), 0), path)
    module = autotuner.module(path)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {"weight": (2, 4, 8), "bias": (2, 4)}
    inputs = (x_of(2, 6, 8), torch.zeros(2, 6, dtype=torch.float64))
    torch.testing.assert_close(outcome(module, *inputs), plain(module, *inputs))
    assert len(module(*inputs)) == len(SHARED["outputs"])  # type: ignore[arg-type]


def test_other_shapes_and_eval_mode_run_the_operators_in_plain_torch_and_drop_as_the_mode_says() -> None:
    of = model(p=WITH_DROPOUT)
    module = autotuner.module(configuration(of, 0))
    without = autotuner.module(configuration(model(), 0))
    without.load_state_dict(module.state_dict())
    for shape in ((2, 6, 8), (3, 4, 8)):
        torch.testing.assert_close(module.eval()(x_of(*shape)), without(x_of(*shape)))
        module.train()
        assert not torch.equal(module(x_of(*shape)), module(x_of(*shape)))
    both = autotuner.module([configuration(of, 0), configuration(model(), 0)])
    before = calls()
    both(x_of(2, 6, 8))
    both.eval()(x_of(2, 6, 8))
    assert [now - then for now, then in zip(calls(), before, strict=True)] == [2, 0]


def test_copies_and_pickles_have_regions_of_their_own_and_other_types_run_plainly() -> None:
    module: Any = autotuner.module(configuration(model(), 0))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        before = calls()
        torch.testing.assert_close(other(x_of(2, 6, 8)), module(x_of(2, 6, 8)))
        assert [now - then for now, then in zip(calls(), before, strict=True)] == [2, 0]
        assert not {region.number for region in other._regions.values()} & {
            region.number for region in module._regions.values()
        }
    single = copy.deepcopy(module).float()
    torch.testing.assert_close(single(x_of(2, 6, 8).float()).double(), module(x_of(2, 6, 8)), rtol=1e-4, atol=1e-4)


def test_inputs_that_are_none_of_the_models_are_refused() -> None:
    module = autotuner.module(configuration(model(), 0))
    with pytest.raises(InputError, match="2 inputs are given; the model's are x"):
        module(x_of(2, 6, 8), x_of(2, 6))
    with pytest.raises(InputError, match="x has 7 elements along h, the parameters 8"):
        module(x_of(2, 6, 7))
    with pytest.raises(InputError, match="x has 2 dimensions, the model's 3: blh"):
        module(x_of(6, 8))


def test_configurations_of_other_models_do_not_make_one_module() -> None:
    with pytest.raises(ConfigurationError, match="the same inputs, parameters and outputs"):
        autotuner.module([configuration(model(), 0), configuration(shared_model(), 0)])
    with pytest.raises(ConfigurationError, match="a configuration at least"):
        autotuner.module([])


@pytest.mark.parametrize("name", ["gpt-block", "llama-block"])
def test_parameters_begin_as_their_readers_want(name: str) -> None:
    of = load_model(name).instantiate(dtype="float64", extents=None, preset="tiny")
    graph = of.graph()
    from autotuner.runtime.model_module import _initial

    for parameter in (n for n, t in graph.tensors.items() if t.role == "parameter"):
        found = _initial(graph, parameter, torch.full(graph.shape(parameter), 7.0, dtype=torch.float64))
        if "norm" in parameter:
            assert bool((found == (1.0 if "scale" in parameter else 0.0)).all()), parameter
        assert float(found.abs().max()) <= 1.0
