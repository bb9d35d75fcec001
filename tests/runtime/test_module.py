import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from autotuner.runtime import TunedModule, check
from autotuner.runtime.check import drawn_masks
from autotuner.runtime.framework import encoder_layer
from autotuner.space import Choice
from tests.runtime.layers import assert_equal, batch, gradients, tuned, tuned_layer
from tests.runtime.plans import MASKED, ODD, WITH_DROPOUT, configuration, model, solved

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(6))
def test_forward_and_every_gradient_equal_the_framework_for_any_plan(seed: int) -> None:
    report = check(configuration(model(), seed), seed)
    assert report.ok, report.worst
    assert set(report.errors) == {"x", "y", *dict(encoder_layer(model()).named_parameters())}


@pytest.mark.parametrize("seed", range(2))
def test_tanh_gelu_with_a_mask_over_keys_equals_the_framework(seed: int) -> None:
    report = check(configuration(MASKED, seed), seed)
    assert report.ok, report.worst


@pytest.mark.parametrize("seed", range(3))
def test_with_dropout_backward_uses_the_masks_that_forward_drew(seed: int) -> None:
    report = check(configuration(model(p=WITH_DROPOUT), seed), seed)
    assert report.ok, report
    assert len(report.masks) == 4


@pytest.mark.parametrize("seed", range(2))
def test_odd_extents_with_one_site_of_dropout_draw_one_mask(seed: int) -> None:
    of = model(ODD, activation="relu", attention_mask=True, output_dropout=0.5)
    report = check(configuration(of, seed), seed)
    assert report.ok, report.worst
    assert list(report.masks) == ["output_dropout_mask"]


def test_a_compiled_fused_kernel_runs_in_a_plan() -> None:
    def cost(choice: Choice) -> float | None:
        if choice.candidate.kernel != "inductor":
            return None
        return 1e-3 if choice.cover.operators == ("residual2", "y") else 1e6

    found = solved(model(dtype="float32"), 0, also=("inductor",), cost=cost)
    assert ("residual2", "y") in [step.operators for step in found.steps if step.kernel == "inductor"]
    assert check(found).ok


def test_a_profile_names_the_operators_and_kernels_of_each_step() -> None:
    found = configuration(model(), 0)
    layer, x = tuned(encoder_layer(model(), 0), found), batch(0).requires_grad_()
    layer(x).sum().backward()
    with torch.profiler.profile() as profile:
        layer(x).sum().backward()
    names = {event.key for event in profile.key_averages()}
    wanted = {f"autotuner: {'+'.join(step.operators)} [{step.kernel}]" for step in found.steps if step.operators}
    assert wanted <= names
    assert len(wanted) > 20


def test_the_generators_seed_reproduces_a_step() -> None:
    layer, _ = tuned_layer(model(p=WITH_DROPOUT))
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(gradients(layer, batch()))
    assert_equal(runs[0], runs[1], 0.0)
    assert not torch.equal(runs[0]["y"], runs[2]["y"])
    assert layer.calls == 3


def test_two_forwards_before_one_backward_keep_their_own_masks() -> None:
    layer, _ = tuned_layer(model(p=WITH_DROPOUT))
    xs = [batch(i).requires_grad_() for i in range(2)]
    torch.manual_seed(0)
    ys = [layer(x) for x in xs]
    masks = [drawn_masks(y, layer.configuration) for y in ys]
    assert not torch.equal(masks[0]["output_dropout_mask"], masks[1]["output_dropout_mask"])
    sum(y.square().sum() for y in ys).backward()
    together = [x.grad for x in xs]
    torch.manual_seed(0)
    apart = []
    for seed in range(2):
        x = batch(seed).requires_grad_()
        layer(x).square().sum().backward()
        apart.append(x.grad)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other)


def test_a_retained_graph_gives_the_same_gradients_again_and_leaves_the_first_ones_alone() -> None:
    layer, _ = tuned_layer(model(p=WITH_DROPOUT))
    x = batch().requires_grad_()
    y = layer(x).square().sum()
    leaves = [x, *layer.parameters()]
    runs = [torch.autograd.grad(y, leaves, retain_graph=True) for _ in range(4)]
    for run in runs[1:]:
        for first, later in zip(runs[0], run, strict=True):
            assert torch.equal(first, later)
            assert first.data_ptr() != later.data_ptr()
    assert len({grads[1].data_ptr() for grads in runs}) == 4


def test_a_second_backward_without_a_retained_graph_is_an_error_as_in_the_framework() -> None:
    layer, _ = tuned_layer()
    y = layer(batch()).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_changing_a_parameter_between_forward_and_backward_is_an_error_as_in_the_framework() -> None:
    layer, _ = tuned_layer()
    y = layer(batch()).sum()
    with torch.no_grad():
        next(layer.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        y.backward()


def test_gradients_accumulate_as_in_the_framework() -> None:
    layer, twin = tuned_layer()
    for step in range(3):
        for module in (layer, twin):
            module(batch(step)).square().sum().backward()
    for (name, one), other in zip(layer.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12, msg=name)


def test_a_kept_gradient_is_not_overwritten_by_a_later_backward() -> None:
    layer, _ = tuned_layer()
    kept = []
    for step in range(4):
        layer.zero_grad(set_to_none=True)
        layer(batch(step)).square().sum().backward()
        grads = [p.grad for p in layer.parameters()]
        kept.append((grads, [g.clone() for g in grads if g is not None]))
    for grads, copies in kept:
        for grad, value in zip(grads, copies, strict=True):
            assert grad is not None
            assert torch.equal(grad, value)


def test_a_kept_output_is_not_overwritten_by_later_calls() -> None:
    layer, _ = tuned_layer()
    with torch.no_grad():
        outputs = [layer(batch(i)) for i in range(5)]
        for i, y in enumerate(outputs):
            torch.testing.assert_close(layer(batch(i)), y, rtol=0, atol=0)


def test_an_output_changed_in_place_leaves_the_gradients_right() -> None:
    layer, twin = tuned_layer()
    found, wanted = (torch.autograd.grad(m(batch()).mul_(2).sum(), [*m.parameters()]) for m in (layer, twin))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_training_goes_on_in_the_same_memory() -> None:
    layer, _ = tuned_layer(model(p=WITH_DROPOUT))
    (binding,) = layer.bind()
    y = None
    for step in range(8):
        layer.zero_grad(set_to_none=True)
        y = layer(batch(step))
        y.sum().backward()
    assert binding.pool.made == 1
    workspace = binding.pool.take()
    assert {phase: len(sets) for phase, sets in workspace.outputs.by_phase.items()} == {"forward": 2, "backward": 1}
    assert workspace.outputs.copies == 0


def test_graphs_that_are_dropped_without_a_backward_give_their_memory_back() -> None:
    layer, _ = tuned_layer()
    pool = layer.bind()[0].pool
    for step in range(6):
        layer(batch(step))
    assert pool.made == 1


def test_checkpointed_calls_that_wait_for_their_backwards_share_a_workspace() -> None:
    layer, twin = tuned_layer()
    found, wanted = (batch().requires_grad_() for _ in range(2))
    y, z = found, wanted
    for _ in range(4):
        y, z = checkpoint(layer, y, use_reentrant=False), twin(z)
    torch.autograd.backward(y.sum())
    torch.autograd.backward(z.sum())
    assert layer._bindings[0].pool.made == 1
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_gradients_are_contiguous_and_are_handed_over_without_a_copy(seed: int) -> None:
    layer, _ = tuned_layer(seed=seed)
    pool = layer.bind()[0].pool
    layer(batch()).sum().backward()
    assert all(p.grad is not None and p.grad.is_contiguous() for p in layer.parameters())
    (made,) = pool.take().outputs.by_phase["backward"]
    handed = [tensor.data_ptr() for tensor in made.handed[1:]]
    assert handed == [p.grad.data_ptr() for p in layer.parameters() if p.grad is not None]


def test_frozen_weights_and_inputs_without_gradient_run_fewer_steps() -> None:
    layer, twin = tuned_layer()
    for module in (layer, twin):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in ("norm2.weight", "linear2.bias"))
        module(batch()).square().sum().backward()
    assert layer.calls == 1
    for (name, one), other in zip(layer.named_parameters(), twin.named_parameters(), strict=True):
        assert (one.grad is None) == (other[1].grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other[1].grad, rtol=1e-12, atol=1e-12)


def test_gradients_of_gradients_equal_those_of_the_framework() -> None:
    layer, twin = tuned_layer()
    found = []
    with sdpa_kernel(SDPBackend.MATH):  # the framework's flash attention has no second derivative
        for module in (layer, twin):
            x = batch().requires_grad_()
            (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(grad.square().sum(), [x, *module.parameters()], allow_unused=True))
    assert layer.calls == 1
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_gradients_of_gradients_with_dropout_are_refused_in_a_sentence() -> None:
    layer, _ = tuned_layer(model(p=WITH_DROPOUT))
    x = batch().requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(grad.sum(), x)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_equals_the_framework_over_three_steps(optimizer: Any) -> None:
    layer, twin = tuned_layer(seed=3)
    steps = [optimizer(module.parameters(), lr=0.05) for module in (layer, twin)]
    for seed in range(3):
        for module, step in zip((layer, twin), steps, strict=True):
            step.zero_grad()
            module(batch(seed)).square().mean().backward()
            step.step()
    assert layer.calls == 3
    for (name, one), other in zip(layer.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8, msg=name)


def test_an_optimizer_made_before_tuning_stays_valid() -> None:
    layer = encoder_layer(model())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    made = tuned(layer, configuration(model(), 3))
    before = layer.linear1.weight.detach().clone()
    made(batch()).square().sum().backward()
    optimizer.step()
    assert not torch.equal(layer.linear1.weight, before)
    assert all(one is other for one, other in zip(made.parameters(), layer.parameters(), strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_the_state_is_the_frameworks_and_goes_both_ways(seed: int) -> None:
    layer, twin = tuned_layer(seed=seed)
    state = layer.state_dict()
    assert list(state) == list(twin.state_dict())
    assert all(torch.equal(state[name], value) for name, value in twin.state_dict().items())
    other = encoder_layer(model(), seed=7)
    layer.load_state_dict(other.state_dict())
    other_again = encoder_layer(model(), seed=8)
    other_again.load_state_dict(layer.state_dict())
    assert_equal(gradients(layer, batch()), gradients(other_again, batch()))
    assert layer.calls == 1


def test_a_deep_copy_trains_on_its_own() -> None:
    layer, twin = tuned_layer(seed=2)
    layer(batch())
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.get_parameter("linear1.weight").zero_()
    assert_equal(gradients(layer, batch()), gradients(twin, batch()))
    with torch.no_grad():
        twin.linear1.weight.zero_()
    assert_equal(gradients(other, batch()), gradients(twin, batch()))
    assert (layer.calls, other.calls) == (2, 2)


def test_a_saved_and_loaded_module_runs_tuned() -> None:
    layer, twin = tuned_layer(seed=2)
    layer(batch())
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, TunedModule)
    assert loaded.configuration.key == layer.configuration.key
    assert_equal(gradients(loaded, batch()), gradients(twin, batch()))
    assert loaded.calls == 2


def test_without_dropout_train_and_eval_both_run_tuned() -> None:
    layer, twin = tuned_layer()
    for mode in (True, False, True):
        layer.train(mode)
        twin.train(mode)
        assert_equal(gradients(layer, batch()), gradients(twin, batch()))
        with torch.no_grad():
            torch.testing.assert_close(layer(batch()), twin(batch()), rtol=1e-12, atol=1e-12)
    with torch.inference_mode():
        torch.testing.assert_close(layer(batch()), twin(batch()), rtol=1e-12, atol=1e-12)
    assert layer.calls == 7
    assert not layer.fallbacks


def test_sequence_first_modules_get_and_return_sequence_first() -> None:
    of = model()
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, "gelu", dtype=torch.float64)
    twin = copy.deepcopy(layer)
    made = tuned(layer, configuration(of, 1))
    x = batch(sequence_first=True)
    assert_equal(gradients(made, x), gradients(twin, x))
    assert made(x).stride() == twin(x).stride()
    assert made.calls == 2


def test_inputs_and_gradients_of_any_strides_are_taken() -> None:
    layer, twin = tuned_layer()
    x = batch(sequence_first=True).transpose(0, 1)
    assert_equal(gradients(layer, x), gradients(twin, x))
    found, wanted = (torch.autograd.grad(m(x).sum(), [*m.parameters()]) for m in (layer, twin))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_parameters_of_other_strides_are_copied_and_stay_what_they_are() -> None:
    layer, twin = tuned_layer(seed=1)
    for step in range(6):
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.t().contiguous().t()
        pointers = [parameter.data_ptr() for parameter in layer.parameters()]
        assert_equal(gradients(layer, batch(step)), gradients(twin, batch(step)))
        assert [parameter.data_ptr() for parameter in layer.parameters()] == pointers
    assert (layer.calls, dict(layer.fallbacks)) == (6, {})


def test_a_module_inside_a_compiled_model_runs_tuned() -> None:
    layer, twin = tuned_layer()
    compiled = torch.compile(nn.Sequential(layer), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(batch()), twin(batch()), rtol=1e-12, atol=1e-12)
    assert layer.calls == 1
