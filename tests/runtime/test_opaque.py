"""A tuned module inside a compiled model: one operator, which the compiler does not look into."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotuner.runtime import TunedModule, TunedWarning
from autotuner.runtime.opaque import _TICKETS
from tests.runtime.layers import assert_equal, batch, gradients, tuned_layer
from tests.runtime.plans import MASKED, WITH_DROPOUT, model

BACKENDS = ("aot_eager", "inductor")
STEPS = 3


@pytest.fixture(autouse=True)
def afresh() -> None:
    torch.compiler.reset()


def compiled(*parts: nn.Module, backend: str = "aot_eager") -> Any:
    return torch.compile(nn.Sequential(*parts), backend=backend, fullgraph=True)


def around(layer: nn.Module) -> list[nn.Module]:
    """Return a layer between two others."""
    torch.manual_seed(1)
    return [nn.Linear(8, 8, dtype=torch.float64), layer, nn.Linear(8, 8, dtype=torch.float64)]


def gradients_of(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return {name.removeprefix("_orig_mod."): value for name, value in gradients(net, x).items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_whole_model_compiles_as_one_graph_and_trains_as_the_framework_does(backend: str) -> None:
    layer, twin = tuned_layer()
    parts = around(layer)
    whole = nn.Sequential(parts[0], twin, copy.deepcopy(parts[2]))
    net = compiled(*parts, backend=backend)
    for step in range(STEPS):
        assert_equal(gradients_of(net, batch(step)), gradients_of(whole, batch(step)), 1e-10)
    assert (layer.calls, dict(layer.fallbacks)) == (STEPS, {})


def test_two_layers_in_a_row_keep_their_own() -> None:
    (one, first), (two, second) = tuned_layer(), tuned_layer(seed=1)
    net = compiled(one, two)
    for step in range(STEPS):
        assert_equal(gradients_of(net, batch(step)), gradients_of(nn.Sequential(first, second), batch(step)), 1e-10)
    assert (one.calls, two.calls) == (STEPS, STEPS)


def test_one_layer_called_twice_in_a_model_draws_other_masks() -> None:
    layer, _ = tuned_layer(model(p=WITH_DROPOUT))

    @torch.compile(backend="inductor", fullgraph=True)
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x), layer(x)

    one, other = twice(batch())
    assert not torch.equal(one, other)


def test_checkpointing_inside_a_compiled_model_draws_the_same_masks_again() -> None:
    layer, _ = tuned_layer(model(p=WITH_DROPOUT))
    found = []
    for checkpointed in (False, True):
        torch.compiler.reset()

        @torch.compile(backend="inductor", fullgraph=True)
        def run(x: Tensor, checkpointed: bool = checkpointed) -> Tensor:
            y: Tensor = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            return y

        torch.manual_seed(0)
        x = batch().requires_grad_()
        torch.autograd.backward(run(x).square().sum())
        found.append(x.grad)
    torch.testing.assert_close(*found, rtol=0.0, atol=0.0)


def test_dropout_follows_torchs_generator() -> None:
    layer, _ = tuned_layer(model(p=WITH_DROPOUT))
    net = compiled(layer)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(gradients_of(net, batch()))
    assert_equal(runs[0], runs[1], 0.0)
    assert not torch.equal(runs[0]["y"], runs[2]["y"])


def test_only_the_wanted_gradients_are_there() -> None:
    layer, twin = tuned_layer()
    frozen, wanted = "linear1.weight", "linear2.weight"
    for module in (layer, twin):
        module.get_parameter(frozen).requires_grad_(False)
    for net in (compiled(layer), twin):
        net(batch()).square().sum().backward()
    assert layer.get_parameter(frozen).grad is None
    found, expected = (module.get_parameter(wanted).grad for module in (layer, twin))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_gradients_accumulate_over_forwards_that_wait_for_their_backwards() -> None:
    layer, twin = tuned_layer()
    net = compiled(layer)
    for module in (net, twin):
        ys = [module(batch(step)).square().sum() for step in range(STEPS)]
        for y in ys:
            y.backward()
    for one, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10)


def test_a_workspace_is_given_back_when_nobody_can_ask_for_a_backward() -> None:
    layer, _ = tuned_layer()
    net = compiled(layer)
    y = net(batch())
    assert len(_TICKETS) == 1
    del y
    with torch.no_grad():
        net(batch())
    assert not _TICKETS
    assert layer._binding is not None
    assert layer._binding.pool.made == 1


def test_a_mask_over_keys_is_an_input_of_the_operator() -> None:
    layer, twin = tuned_layer(MASKED)
    mask = torch.zeros(2, 6, dtype=torch.float64)
    mask[0, 4:] = torch.finfo(torch.float64).min

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: Tensor) -> Tensor:
        y: Tensor = layer.run(x, mask, lambda _: pytest.fail("the original runs"))
        return y

    torch.testing.assert_close(run(batch()), twin(batch(), src_key_padding_mask=mask), rtol=1e-10, atol=1e-10)


def test_what_the_configuration_does_not_cover_runs_the_original_behind_a_break_of_the_graph() -> None:
    layer, twin = tuned_layer(model(p=WITH_DROPOUT))
    net = torch.compile(nn.Sequential(layer), backend="aot_eager")
    net(batch())
    layer.eval(), twin.eval()
    with pytest.warns(TunedWarning, match="in eval mode"):
        torch.testing.assert_close(net(batch()), twin(batch()), rtol=1e-10, atol=1e-10)
    assert (layer.calls, dict(layer.fallbacks)) == (1, {"settings": 1})


def test_a_change_that_the_compiler_does_not_guard_is_an_error_and_no_wrong_result() -> None:
    layer, _ = tuned_layer()
    net = compiled(layer)
    net(batch())
    layer.get_submodule("linear1").register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="has changed since it was compiled: a submodule has hooks"):
        net(batch())


def test_a_copy_of_a_compiled_module_is_another_one() -> None:
    layer, _ = tuned_layer()
    net = compiled(layer)
    net(batch())
    other = copy.deepcopy(layer)
    assert isinstance(other, TunedModule)
    with torch.no_grad():
        other.get_parameter("linear1.weight").zero_()
        other(batch())  # binds, and is numbered
    torch.testing.assert_close(compiled(other)(batch()), other(batch()))
    assert other.number != layer.number


def test_the_compiler_keeps_it_out_of_its_own_cuda_graphs() -> None:
    for operator in (torch.ops.autotuner.tuned_layer, torch.ops.autotuner.tuned_layer_backward):
        assert torch.Tag.cudagraph_unsafe in operator.default.tags


def test_the_compiler_is_told_the_shapes_and_strides_that_it_gets() -> None:
    layer, _ = tuned_layer()
    arguments = (layer.number, 0, batch().requires_grad_(), None, [*layer.parameters()])
    torch.library.opcheck(
        torch.ops.autotuner.tuned_layer.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
