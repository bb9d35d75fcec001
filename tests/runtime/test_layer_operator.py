"""A tuned module inside a compiled model: one operator, which the compiler does not look into."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from autotuner.runtime import TunedModule, TunedWarning, apply
from autotuner.runtime.framework import encoder_layer
from autotuner.runtime.ticket import TICKETS
from tests.runtime.bert_layers import KEEPS, additive, bert_layer
from tests.runtime.kinds import KINDS, pair
from tests.runtime.layers import assert_equal, batch, gradients, tuned_layer
from tests.runtime.plans import MASKED, WITH_DROPOUT, configuration, model

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


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_whole_model_compiles_as_one_graph_and_trains_as_the_framework_does(backend: str) -> None:
    layer, twin = tuned_layer()
    parts = around(layer)
    whole = nn.Sequential(parts[0], twin, copy.deepcopy(parts[2]))
    net = compiled(*parts, backend=backend)
    for step in range(STEPS):
        assert_equal(gradients_of(net, batch(step)), gradients_of(whole, batch(step)), 1e-10)
    assert (layer.calls, dict(layer.fallbacks)) == (STEPS, {})


@pytest.mark.slow
def test_parameters_that_were_loaded_in_place_of_others_are_followed_without_a_break() -> None:
    layer, _ = tuned_layer(seed=1)
    net = compiled(layer)
    gradients(net, batch())
    fresh = encoder_layer(model(), 5)
    layer.load_state_dict(copy.deepcopy(fresh.state_dict()), assign=True)
    for step in range(STEPS):
        assert_equal(gradients_of(net, batch(step)), gradients_of(nn.Sequential(fresh), batch(step)), 1e-10)
    assert (layer.calls, dict(layer.fallbacks)) == (1 + STEPS, {})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "backend"), [*((kind, "aot_eager") for kind in KINDS), (KINDS[-1], "inductor")])
def test_layers_of_each_kind_and_plan_train_compiled_with_ordinary_gradients(kind: str, backend: str) -> None:
    layer, twin = pair(kind)
    net = compiled(layer, backend=backend)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01, fused=True) for module in (layer, twin)]
    for step in range(STEPS):
        assert_equal(gradients_of(net, batch(step)), gradients_of(nn.Sequential(twin), batch(step)), 1e-9)
        assert all(p.grad is not None and p.grad.is_contiguous() for p in layer.parameters())
        for optimizer in optimizers:
            optimizer.step()
    assert (layer.calls, dict(layer.fallbacks)) == (STEPS, {})


@pytest.mark.slow
def test_one_weight_of_a_stack_can_be_frozen() -> None:
    layer, twin = pair("bert")
    for module in (layer, twin):
        module.get_parameter("attention.self.key.weight").requires_grad_(False)
    net = compiled(layer)
    assert_equal(gradients_of(net, batch()), gradients_of(nn.Sequential(twin), batch()), 1e-9)


@pytest.mark.slow
def test_two_layers_in_a_row_keep_their_own() -> None:
    (one, first), (two, second) = tuned_layer(), tuned_layer(seed=1)
    net = compiled(one, two)
    for step in range(STEPS):
        assert_equal(gradients_of(net, batch(step)), gradients_of(nn.Sequential(first, second), batch(step)), 1e-10)
    assert (one.calls, two.calls) == (STEPS, STEPS)


@pytest.mark.slow
def test_one_layer_called_twice_in_a_model_draws_other_masks() -> None:
    layer, _ = tuned_layer(model(p=WITH_DROPOUT))

    @torch.compile(backend="inductor", fullgraph=True)
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x), layer(x)

    one, other = twice(batch())
    assert not torch.equal(one, other)


@pytest.mark.slow
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


@pytest.mark.slow
def test_dropout_follows_torchs_generator() -> None:
    layer, _ = tuned_layer(model(p=WITH_DROPOUT))
    net = compiled(layer)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(gradients_of(net, batch()))
    assert_equal(runs[0], runs[1], 0.0)
    assert not torch.equal(runs[0]["y"], runs[2]["y"])


@pytest.mark.slow
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


@pytest.mark.slow
def test_gradients_accumulate_over_forwards_that_wait_for_their_backwards() -> None:
    layer, twin = tuned_layer()
    net = compiled(layer)
    for module in (net, twin):
        ys = [module(batch(step)).square().sum() for step in range(STEPS)]
        for y in ys:
            y.backward()
    for one, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_a_workspace_is_given_back_when_nobody_can_ask_for_a_backward() -> None:
    layer, _ = tuned_layer()
    net = compiled(layer)
    y = net(batch())
    assert len(TICKETS) == 1
    del y
    with torch.no_grad():
        net(batch())
    assert not TICKETS
    (binding,) = layer._bindings
    assert binding.pool.made == 1


@pytest.mark.slow
def test_a_mask_over_keys_is_an_input_of_the_operator() -> None:
    layer, twin = tuned_layer(MASKED)
    mask = torch.zeros(2, 6, dtype=torch.float64)
    mask[0, 4:] = torch.finfo(torch.float64).min

    run: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for step in range(STEPS):
        found, wanted = (gradients(net, batch(step), src_key_padding_mask=mask) for net in (run, twin))
        assert_equal({n.removeprefix("_orig_mod."): g for n, g in found.items()}, wanted, 1e-10)
    assert (layer.calls, dict(layer.fallbacks)) == (STEPS, {})


@pytest.mark.slow
def test_a_mask_that_masks_something_runs_the_original_inside_the_operator_if_no_plan_has_it() -> None:
    layer, twin = pair("bert")
    run: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    keeps = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    for step, kept in enumerate((True, False, True, False)):
        keeps[0, :, :, 4:] = kept
        found, wanted = (gradients(net, batch(step), attention_mask=keeps) for net in (run, twin))
        assert_equal({n.removeprefix("_orig_mod."): g for n, g in found.items()}, wanted, 1e-9)
    assert (layer.calls, dict(layer.fallbacks)) == (2, {"mask": 2})


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "attention"), [("aot_eager", "eager"), ("inductor", "sdpa")])
def test_a_compiled_model_that_always_gives_a_mask_runs_tuned_where_nothing_is_masked(
    backend: str, attention: str
) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=8, num_attention_heads=2, intermediate_size=12, num_hidden_layers=2, vocab_size=11,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-5, attn_implementation=attention,
    )  # fmt: skip
    whole: Any = BertModel(config, add_pooling_layer=False).double()
    twin = copy.deepcopy(whole)
    for number in range(2):
        whole.encoder.layer[number] = apply(whole.encoder.layer[number], configuration(model(), number))
    net: Any = torch.compile(whole, backend=backend, fullgraph=True)
    words, keeps = torch.arange(12).view(2, 6) % 11, torch.ones(2, 6, dtype=torch.long)
    for _ in range(STEPS):
        for module in (whole, twin):
            module.zero_grad()
        net(words, attention_mask=keeps).last_hidden_state.square().sum().backward()
        twin(words, attention_mask=keeps).last_hidden_state.square().sum().backward()
        for (name, one), other in zip(whole.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9, msg=name)
    assert [(layer.calls, dict(layer.fallbacks)) for layer in whole.encoder.layer] == [(STEPS, {})] * 2


@pytest.mark.slow
def test_what_the_configuration_does_not_cover_runs_the_original_behind_a_break_of_the_graph() -> None:
    layer, twin = tuned_layer(model(p=WITH_DROPOUT))
    net = torch.compile(nn.Sequential(layer), backend="aot_eager")
    net(batch())
    layer.eval(), twin.eval()
    with pytest.warns(TunedWarning, match="in eval mode"):
        torch.testing.assert_close(net(batch()), twin(batch()), rtol=1e-10, atol=1e-10)
    assert (layer.calls, dict(layer.fallbacks)) == (1, {"settings": 1})


def test_a_hook_that_the_compiler_does_not_guard_is_called_by_the_original_inside_the_operator() -> None:
    layer, twin = tuned_layer()
    net = compiled(layer)
    gradients_of(net, batch())
    seen: list[int] = []
    layer.get_submodule("linear1").register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(TunedWarning, match="has hooks"):
        found = gradients_of(net, batch())
    assert_equal(found, gradients_of(nn.Sequential(twin), batch()), 1e-10)
    assert (len(seen), dict(layer.fallbacks)) == (1, {"hooks": 1})


def test_a_forward_replaced_before_compiling_is_called() -> None:
    layer, twin = tuned_layer()
    for module in (layer, twin):
        part: Any = module.get_submodule("norm1")
        part.forward = lambda x, own=part.forward: 2 * own(x)
    with pytest.warns(TunedWarning, match="forward of a submodule was replaced"):
        torch.testing.assert_close(compiled(layer)(batch()), twin(batch()), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_a_module_that_was_converted_after_compiling_is_an_error_and_no_wrong_result() -> None:
    layer, _ = tuned_layer()
    net = compiled(layer)
    net(batch())
    layer.get_parameter("linear1.weight").data = torch.zeros(12, 8)
    with pytest.raises(RuntimeError):
        net(batch())


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "first"), [(1, 0), (2, 1)])
def test_plans_with_and_without_a_mask_run_in_one_compiled_layer(seed: int, first: int) -> None:
    layer = bert_layer()
    twin = copy.deepcopy(layer)
    plans = [configuration(model(), 1), configuration(model(attention_mask=True), seed)]
    made: Any = apply(layer, plans if first == 0 else plans[::-1])
    net: Any = torch.compile(made, backend="aot_eager", fullgraph=True)
    for mask in (additive(KEEPS), None, additive(torch.ones(2, 6, dtype=torch.bool))):
        found, wanted = (gradients(module, batch(), attention_mask=mask) for module in (net, twin))
        assert_equal({name.removeprefix("_orig_mod."): value for name, value in found.items()}, wanted, 1e-9)
    assert (made.calls, dict(made.fallbacks)) == (3, {})


@pytest.mark.slow
def test_a_mask_that_no_plan_covers_is_told_as_one_beside_plans_of_other_modes() -> None:
    layer = bert_layer(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    twin = copy.deepcopy(layer).eval()
    dropped = model(p=0.3, activation_dropout=0.0)
    made: Any = apply(layer, [configuration(dropped), configuration(model())])
    net = torch.compile(made.eval(), backend="aot_eager", fullgraph=True)
    for module in (made, net):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", TunedWarning)
            found = module(batch(), attention_mask=additive(KEEPS))
        torch.testing.assert_close(found, twin(batch(), attention_mask=additive(KEEPS)), rtol=1e-10, atol=1e-10)
    assert dict(made.fallbacks) == {"mask": 2}


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_parameters_that_are_not_its_own_are_refused_whatever_the_mask(masked: bool) -> None:
    layer, _ = pair("bert")
    others = {name: nn.Parameter(parameter.detach() * 2) for name, parameter in layer.named_parameters()}
    mask = additive(KEEPS) if masked else None

    @torch.compile(backend="aot_eager")
    def called(given: Any, x: Tensor) -> Any:
        return torch.func.functional_call(layer, given, (x,), {"attention_mask": mask})

    with pytest.raises(RuntimeError, match="was given others"):
        called(others, batch())


@pytest.mark.slow
def test_hooks_and_replaced_parts_run_the_original_behind_a_break_of_the_graph() -> None:
    seen: list[nn.Module] = []
    layer, twin = tuned_layer()
    layer.get_submodule("linear1").register_forward_hook(lambda part, *_: seen.append(part))
    net: Any = torch.compile(nn.Sequential(layer), backend="aot_eager")
    with pytest.warns(TunedWarning, match="has hooks"):
        torch.testing.assert_close(net(batch()), twin(batch()), rtol=1e-10, atol=1e-10)
    assert (layer.calls, dict(layer.fallbacks), len(seen)) == (0, {"hooks": 1}, 1)

    class Wider(nn.Linear):
        pass

    layer, twin = tuned_layer()
    first = layer.get_submodule("linear1")
    first.__class__ = Wider
    layer.linear1 = Wider(8, 12, dtype=torch.float64)
    layer.linear1.load_state_dict(first.state_dict())
    net = torch.compile(nn.Sequential(layer), backend="aot_eager")
    with pytest.warns(TunedWarning):
        torch.testing.assert_close(net(batch()), twin(batch()), rtol=1e-10, atol=1e-10)
    assert layer.calls == 0


@pytest.mark.slow
def test_parameters_that_are_not_its_own_are_an_error_and_no_wrong_result() -> None:
    layer, _ = tuned_layer()
    others = {name: nn.Parameter(parameter.detach() * 2) for name, parameter in layer.named_parameters()}

    @torch.compile(backend="aot_eager")
    def called(given: Any, x: Tensor) -> Any:
        return torch.func.functional_call(layer, given, (x,))

    with pytest.raises(RuntimeError, match="was given others"):
        called(others, batch())

    @torch.compile(backend="aot_eager")
    def changed(x: Tensor) -> Any:
        with torch.no_grad():
            layer.get_parameter("linear1.weight").mul_(2.0)
        return layer(x)

    with pytest.raises(RuntimeError, match="was given others"):
        changed(batch())


def test_a_parameter_that_changes_between_forward_and_backward_is_noticed() -> None:
    layer, _ = tuned_layer()
    y = compiled(layer)(batch().requires_grad_())
    with torch.no_grad():
        layer.get_parameter("linear1.weight").mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.slow
def test_a_model_that_is_gone_has_its_backward() -> None:
    layer, twin = tuned_layer()
    net = compiled(layer, backend="inductor")
    x, twins = (batch().requires_grad_() for _ in range(2))
    y = net(x)
    del net, layer
    y.sum().backward()
    twin(twins).sum().backward()
    torch.testing.assert_close(x.grad, twins.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_layers_that_are_compiled_one_by_one_share_their_code() -> None:
    """torch gives up at the ninth compilation of one function."""
    layers = [tuned_layer()[0] for _ in range(10)]
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
        layer(batch())
    assert [layer.calls for layer in layers] == [1] * 10


@pytest.mark.slow
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
    assert not torch.equal(other.key, layer.key)


@pytest.mark.parametrize("seed", range(3))
def test_the_compiler_is_told_the_shapes_and_strides_that_it_gets(seed: int) -> None:
    layer, _ = tuned_layer(seed=seed)
    parameters, (binding,) = [*layer.parameters()], layer._bindings
    x, forward, backward = batch(), torch.ops.autotuner.tuned_region, torch.ops.autotuner.tuned_region_backward
    results, wanted = binding.results, [True] * (1 + len(parameters))
    own = [layer.get_parameter(name) for name in layer.names]
    (y,), ticket = forward(0, x, [x], own, results, layer.key)
    real = [y, *backward(0, ticket, [torch.ones_like(y)], [], own, results, wanted), ticket]
    plain = [tensor.detach() for tensor in (x, layer.key, *own)]
    with FakeTensorMode() as mode:
        told_x, told_key, *told_own = (mode.from_tensor(tensor) for tensor in plain)
        (told,), token = forward(0, told_x, [told_x], told_own, results, told_key)
        promised = [told, *backward(0, token, [torch.empty_like(told)], [], told_own, results, wanted), token]
    assert [(t.dtype, t.shape, t.stride()) for t in real] == [(t.dtype, t.shape, t.stride()) for t in promised]
