"""A tuned region as one operator: eagerly, and inside a compiled model."""

import copy
import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from autotuner.errors import ConfigurationError
from autotuner.plan.memory_planner import Port
from autotuner.runtime.bound_parameters import MOVES
from autotuner.runtime.region import TunedRegion
from autotuner.runtime.region_operator import RegionResults
from autotuner.runtime.region_plan import RegionPlan
from autotuner.runtime.saved_state import LEASES
from autotuner.runtime.scratch import Scratch, sharing
from tests.runtime.plans import WITH_DROPOUT, configuration, model, solved
from tests.runtime.regions import (
    Run,
    assert_same,
    declared_ports,
    drawn,
    given,
    operands,
    reference,
    shared,
    shared_model,
    shared_operands,
    shared_ports,
    siblings_model,
    step,
)

STEPS = 3
BACKENDS = ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow))


@pytest.fixture(autouse=True)
def afresh() -> None:
    torch.compiler.reset()


@pytest.fixture
def region() -> TunedRegion:
    return TunedRegion(configuration(shared_model()), shared_ports())


def compiled(run: Callable[..., Any], backend: str = "aot_eager") -> Any:
    return torch.compile(run, backend=backend, fullgraph=True)


def copies(operands: tuple[list[Tensor], list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    inputs, parameters = ([t.detach().clone().requires_grad_(t.requires_grad) for t in side] for side in operands)
    return inputs, parameters


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_layers_that_share_a_scratch_compute_what_they_compute_alone(seed: int) -> None:
    of = model()
    found = configuration(of, seed)
    (x, *_), parameters = operands(of)
    shared_by, alone = (
        [TunedRegion(found, declared_ports(of), in_place=in_place) for _ in range(STEPS)] for in_place in (True, False)
    )
    memory = shared_by[0].plan.memory
    assert memory.kept_bytes < memory.arena_bytes

    def run(x: Tensor, layers: Sequence[TunedRegion]) -> Tensor:
        for layer in layers:
            (x,) = layer.call([x], parameters)
        return x

    expected = step(lambda inputs, _: [run(inputs[0], alone)], [x], parameters)
    scratch = Scratch()
    for _ in range(2):
        with sharing(scratch):
            assert_same(step(lambda inputs, _: [run(inputs[0], shared_by)], [x], parameters), expected)
    own = {layer.bound.found(parameters, x.device).made for layer in shared_by}  # type: ignore[union-attr]
    assert own == {1}, "the second step takes up the workspaces of the first"
    assert_same(step(lambda inputs, _: [run(inputs[0], shared_by)], [x], parameters), expected)
    made = {layer.bound.found(parameters, x.device).made for layer in shared_by}  # type: ignore[union-attr]
    assert made == {2}, "who does not share it has a workspace without"


@pytest.mark.parametrize("seed", range(4))
def test_forward_and_gradients_equal_plain_torch(seed: int) -> None:
    region = TunedRegion(configuration(shared_model(), seed), shared_ports())
    for number in range(STEPS):
        inputs, parameters = shared_operands(number)
        assert_same(step(region.call, inputs, parameters), step(shared, inputs, parameters))
    assert region.calls == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "options"), [(0, {}), (1, {"attention_mask": True}), (2, {"p": WITH_DROPOUT})])
def test_a_whole_layer_as_a_region_equals_its_graph_in_float64(seed: int, options: dict[str, Any]) -> None:
    of = model(**options)
    found = configuration(of, seed)
    region = TunedRegion(found, declared_ports(of))
    inputs, parameters = operands(of)
    outputs = region.call(inputs, parameters)
    masks = drawn(found)
    assert bool(masks) == ("p" in options)
    torch.autograd.backward(outputs, given(outputs))
    results = [*(y.detach() for y in outputs), *(leaf.grad for leaf in (*inputs, *parameters))]
    assert_same(results, reference(found, region, [*inputs, *parameters], masks))
    storages = [t.untyped_storage().data_ptr() for t in (*outputs, *inputs, *parameters)]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_trains_as_plain_torch_does(region: TunedRegion, backend: str) -> None:
    def around(run: Run) -> Run:
        def called(inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
            added, x = inputs
            context, key = run([added, x.sin()], parameters)
            return [context.cos() + key.view(2, 6, 2, 4).transpose(1, 2), key * 2]

        return called

    net = compiled(around(region.call), backend)
    for number in range(STEPS):
        inputs, parameters = shared_operands(number)
        assert_same(step(net, inputs, parameters), step(around(shared), inputs, parameters))
    assert region.calls == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_regions_in_an_fx_graph_are_places_of_their_own_with_one_memory_plan(backend: str) -> None:
    of = configuration(model(p=WITH_DROPOUT), 1)
    regions = [TunedRegion(of, declared_ports(of.model)) for _ in range(2)]
    assert regions[0].plan is regions[1].plan
    inputs, parameters = operands(of.model)
    graph = fx.Graph()
    nodes = [graph.placeholder(f"arg{number}") for number in range(1 + len(parameters))]
    made = []
    for region in regions:
        called = graph.call_function(region.operator, region.arguments(nodes[:1], nodes[1:]))
        outputs = graph.call_function(getitem, (called, 0))
        made.append(graph.call_function(getitem, (outputs, 0)))
    graph.output(tuple(made))
    net = compiled(fx.GraphModule(nn.Module(), graph), backend)
    one, other = net(*inputs, *parameters)
    assert not torch.equal(one, other)
    torch.autograd.backward((one + other).sum())
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in (*inputs, *parameters))
    assert [region.calls for region in regions] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_stacked_gradients_of_a_compiled_layer_lie_alone(seed: int) -> None:
    of = model()
    found = configuration(of, seed)
    region = TunedRegion(found, declared_ports(of))
    inputs, parameters = operands(of)
    for leaf in parameters[::2]:
        leaf.requires_grad_(False)
    results = step(compiled(region.call), inputs, parameters)
    wanted = reference(found, region, [*inputs, *parameters], {})
    frozen = 1 + len(inputs)
    wanted[frozen::2] = [None] * len(parameters[::2])
    assert_same(results, wanted)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_outputs_that_a_plan_makes_in_one_buffer_are_returned_apart(is_compiled: bool) -> None:
    of = siblings_model()
    found = solved(of, 0, cost=lambda choice: 0.1 if len(choice.cover.operators) == 3 else 100.0)
    region = TunedRegion(found, declared_ports(of))
    memory = region.plan.memory
    assert len({memory.buffer_of[memory.outputs[name]] for name in ("query", "key", "value")}) == 1
    assert region.plan.results.stacks == (0, 0, 0)
    inputs, parameters = operands(of)
    run = compiled(region.call) if is_compiled else region.call
    assert_same(step(run, inputs, parameters), reference(found, region, [*inputs, *parameters], {}))
    outputs = run(inputs, parameters)
    torch.autograd.backward(outputs, given(outputs))
    tensors = [*outputs, *(leaf.grad for leaf in inputs)]
    assert len({t.untyped_storage().data_ptr() for t in tensors if t is not None}) == len(tensors)


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_frozen_parameters_have_no_gradient(region: TunedRegion, frozen: tuple[int, ...], is_compiled: bool) -> None:
    inputs, parameters = shared_operands()
    for number in frozen:
        parameters[number].requires_grad_(False)
    run = compiled(region.call) if is_compiled else region.call
    found = step(run, inputs, parameters)
    assert all(found[4 + number] is None for number in frozen)
    assert_same(found, step(shared, inputs, parameters))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_that_a_capture_would_read_in_place_are_kept_for_backward(backend: str) -> None:
    region = TunedRegion(configuration(shared_model()), shared_ports(), in_place=True)
    inputs, parameters = shared_operands()
    wanted = step(shared, inputs, parameters)
    assert_same(step(region.call, *copies((inputs, parameters))), wanted)
    assert_same(step(compiled(region.call, backend), *copies((inputs, parameters))), wanted)
    mask, x = inputs
    y, *_ = region.call(inputs, parameters)
    with torch.no_grad():
        mask.mul_(2)  # backward does not read it
    (expected,) = torch.autograd.grad(shared(inputs, parameters)[0].sum(), x)
    assert_same([torch.autograd.grad(y.sum(), x)[0]], [expected])
    y, *_ = region.call(inputs, parameters)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_only_parameters_want_gradients(region: TunedRegion, is_compiled: bool) -> None:
    inputs, parameters = shared_operands()
    inputs[1].requires_grad_(False)
    run = compiled(region.call) if is_compiled else region.call
    assert_same(step(run, inputs, parameters), step(shared, inputs, parameters))


@pytest.mark.parametrize("chosen", [0, 1])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_output_without_a_gradient_counts_as_zeros(region: TunedRegion, chosen: int, is_compiled: bool) -> None:
    run = compiled(region.call) if is_compiled else region.call
    operands = shared_operands()
    assert_same(
        step(lambda *given: run(*given)[chosen : chosen + 1], *operands),
        step(lambda *given: shared(*given)[chosen : chosen + 1], *operands),
    )


def test_a_mask_that_wants_a_gradient_gets_none(region: TunedRegion) -> None:
    inputs, parameters = shared_operands()
    inputs[0].requires_grad_()
    for leaf in (inputs[1], *parameters):
        leaf.requires_grad_(False)
    torch.autograd.backward(region.call(inputs, parameters)[0].sum())
    assert inputs[0].grad is None


@pytest.mark.parametrize("is_compiled", [False, True])
def test_two_forwards_wait_for_their_backwards(region: TunedRegion, is_compiled: bool) -> None:
    run = compiled(region.call) if is_compiled else region.call
    sums: list[list[Tensor | None]] = []
    for each in (run, shared):
        parameters = shared_operands()[1]
        inputs = [shared_operands(number)[0] for number in range(STEPS)]
        waiting = [each(given, parameters) for given in inputs]
        for outputs in waiting:
            torch.autograd.backward(outputs, given(outputs))
        sums.append([leaf.grad for leaf in (*(x for _, x in inputs), *parameters)])
    found, wanted = sums
    assert_same(found, wanted)


def test_what_is_returned_is_the_callers_own(region: TunedRegion) -> None:
    inputs, parameters = shared_operands()
    outputs = region.call(inputs, parameters)
    kept = [y.detach().clone() for y in outputs]
    with torch.no_grad():
        for y in outputs:
            y.detach().zero_()
    torch.autograd.backward(outputs, given(outputs))
    gradients = [leaf.grad for leaf in (*inputs, *parameters)]
    assert_same([*kept, *gradients], step(shared, *copies((inputs, parameters))))
    first = [None if one is None else one.clone() for one in gradients]
    for number in range(STEPS):
        step(region.call, *shared_operands(number))
    assert_same(gradients, first)


def test_inputs_of_any_strides_are_taken(region: TunedRegion) -> None:
    (added, x), parameters = shared_operands()
    wide = torch.randn(8, 2, 12, dtype=torch.float64)
    x = wide.permute(2, 1, 0)[::2].detach().requires_grad_()
    added = torch.zeros(1, 1, dtype=torch.float64).expand(2, 6)
    assert_same(step(region.call, [added, x], parameters), step(shared, [added, x], parameters))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_parameters_that_move_each_step_are_followed(region: TunedRegion, is_compiled: bool) -> None:
    run = compiled(region.call) if is_compiled else region.call
    held = []
    for number in range(2 * MOVES):
        inputs, parameters = shared_operands(number)
        held.append(parameters)
        assert_same(step(run, inputs, parameters), step(shared, inputs, parameters))
    made = region.bound.last.pool.made
    for number in range(STEPS):
        inputs, parameters = shared_operands(number)
        held.append(parameters)
        assert_same(step(run, inputs, parameters), step(shared, inputs, parameters))
    assert region.bound.last.pool.made == made


def test_models_that_share_compiled_code_have_bindings_of_their_own(region: TunedRegion) -> None:
    models = [shared_operands(number)[1] for number in range(3)]
    pools = []
    for number in range(3 * STEPS):
        inputs, _ = shared_operands(number)
        parameters = models[number % 3]
        for parameter in parameters:
            parameter.grad = None
        assert_same(step(region.call, inputs, parameters), step(shared, inputs, parameters))
        pools.append(region.bound.last.pool)
    assert len(set(pools[3:])) == 3
    assert pools[-3:] == pools[-6:-3]
    assert all(pool.made == 1 for pool in pools[-3:])


def test_parameters_that_move_between_forward_and_backward_are_followed(region: TunedRegion) -> None:
    inputs, parameters = shared_operands()
    outputs = region.call(inputs, parameters)
    for parameter in parameters:
        old, parameter.data = parameter.data, parameter.data.clone()
        old.zero_()
    torch.autograd.backward(outputs, given(outputs))
    found = [*(y.detach() for y in outputs), *(leaf.grad for leaf in (*inputs, *parameters))]
    assert_same(found, step(shared, *copies((inputs, parameters))))


def test_one_tensor_as_two_parameters_is_one_weight_that_is_tied() -> None:
    of = model()
    found = configuration(of, 2)
    region = TunedRegion(found, declared_ports(of))
    (x,), parameters = operands(of)
    names = [port.name for port in declared_ports(of).parameters]
    query, key = names.index("query_weight"), names.index("key_weight")
    parameters[key] = parameters[query]
    results = step(region.call, [x], parameters)
    wanted: Any = reference(found, region, [x, *parameters], {})
    wanted[2 + query] = wanted[2 + key] = wanted[2 + query] + wanted[2 + key]
    assert_same(results, wanted)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_without_autograd_a_workspace_is_given_back_at_once(region: TunedRegion, mode: Any, is_compiled: bool) -> None:
    run = compiled(region.call) if is_compiled else region.call
    for number in range(STEPS):
        inputs, parameters = shared_operands(number)
        with mode():
            found, wanted = run(inputs, parameters), shared(inputs, parameters)
        assert_same(found, wanted)
        assert not LEASES
    frozen = [[tensor.detach() for tensor in side] for side in shared_operands()]
    outputs = run(*frozen)
    assert not LEASES
    assert not any(y.requires_grad for y in outputs)
    assert region.bound.last.pool.made == 1


def test_backward_twice_keeps_or_says_what_is_gone(region: TunedRegion) -> None:
    inputs, parameters = shared_operands()
    outputs = region.call(inputs, parameters)
    once = torch.autograd.grad(outputs, [inputs[1], *parameters], given(outputs), retain_graph=True)
    again = torch.autograd.grad(outputs, [inputs[1], *parameters], given(outputs))
    assert_same(once, again)
    with pytest.raises(RuntimeError, match="backward"):
        torch.autograd.grad(outputs, inputs[1:], given(outputs))


def test_a_second_derivative_is_a_clear_error(region: TunedRegion) -> None:
    inputs, parameters = shared_operands()
    outputs = region.call(inputs, parameters)
    (grad,) = torch.autograd.grad(outputs, inputs[1:], given(outputs), create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative through a tuned region"):
        torch.autograd.backward(grad.sum())


def cloning() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor)


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {}),
        pytest.param(1, {"attention_mask": True}, marks=pytest.mark.slow),
        pytest.param(2, {"p": WITH_DROPOUT}, marks=pytest.mark.slow),
        pytest.param(3, {"p": WITH_DROPOUT}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_hooks_give_backward_copies_of_what_forward_saved(
    seed: int, options: dict[str, Any], in_place: bool, is_compiled: bool
) -> None:
    of = model(**options)
    region = TunedRegion(configuration(of, seed), declared_ports(of), in_place=in_place)
    run = compiled(region.call) if is_compiled else region.call
    batches = [operands(of, number) for number in range(STEPS)]
    parameters = batches[0][1]
    torch.manual_seed(0)
    wanted = [step(run, inputs, parameters) for inputs, _ in batches]
    torch.manual_seed(0)
    waiting = []
    with cloning():
        for inputs, _ in batches:
            waiting.append(run(inputs, parameters))
            assert not LEASES, "the workspace is free, and its memory taken by the next forward"
    assert region.bound.last.pool.made == 1
    for number, (inputs, _) in enumerate(batches):
        leaves = (*inputs, *parameters)
        outputs = waiting[number]
        for keeps in (False,) if is_compiled else (True, False):
            grads = torch.autograd.grad(outputs, leaves, given(outputs), retain_graph=keeps, allow_unused=True)
            assert_same([*(y.detach() for y in outputs), *grads], wanted[number])


def test_parameters_that_are_copied_are_copied_again_for_a_saved_copy(region: TunedRegion) -> None:
    for number in range(2 * MOVES):
        inputs, parameters = shared_operands(number)
        wanted = step(shared, inputs, parameters)
        with cloning():
            assert_same(step(region.call, inputs, parameters), wanted)


@pytest.mark.slow
def test_checkpointing_in_a_compiled_model_draws_the_same_masks_again() -> None:
    of = configuration(model(p=WITH_DROPOUT))
    region = TunedRegion(of, declared_ports(of.model))
    inputs, parameters = operands(of.model)
    found = []
    for checkpointed in (False, True):
        torch.compiler.reset()

        def run(x: Tensor, checkpointed: bool = checkpointed) -> Tensor:
            def inside(x: Tensor) -> Tensor:
                return region.call([x], parameters)[0].sin()

            y: Tensor = checkpoint(inside, x, use_reentrant=False) if checkpointed else inside(x)
            return y

        torch.manual_seed(0)
        (x,) = inputs
        (grad,) = torch.autograd.grad(compiled(run, "inductor")(x).square().sum(), x)
        found.append(grad)
    torch.testing.assert_close(*found, rtol=0.0, atol=0.0)


def test_dropout_follows_torchs_generator() -> None:
    of = configuration(model(p=WITH_DROPOUT))
    region = TunedRegion(of, declared_ports(of.model))
    inputs, parameters = operands(of.model)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(step(region.call, inputs, parameters))
    assert_same(runs[0], runs[1], 0.0)
    assert not torch.equal(*(run[0] for run in runs[1:] if run[0] is not None))


def test_other_inputs_and_parameters_are_errors_that_say_what_was_tuned(region: TunedRegion) -> None:
    (added, x), (bias, weight) = shared_operands()
    with pytest.raises(
        RuntimeError, match=r"arg1 is float64 \(5, 2, 8\) on cpu, and it was tuned for float64 \(6, 2, 8"
    ):
        region.call([added, x[1:]], [bias, weight])
    with pytest.raises(RuntimeError, match=r"arg1 is float32 \(6, 2, 8\) on cpu, and it was tuned for float64"):
        region.call([added, x.float()], [bias, weight])
    with pytest.raises(RuntimeError, match=r"weight is float64 \(8,\) on cpu, and it was tuned for float64 \(8, 8\)"):
        region.call([added, x], [bias, bias])
    with pytest.raises(RuntimeError, match="on meta, and it was tuned for float64"):
        region.forward([added, x], [bias, weight.to("meta")], in_place=False)
    region.call([added, x], [bias, weight])
    with pytest.raises(
        RuntimeError, match=r"arg1 is float64 \(5, 2, 8\) on cpu, and it was tuned for float64 \(6, 2, 8"
    ):
        region.call([added, x[1:]], [bias, weight])
    with pytest.raises(RuntimeError, match="1 inputs and 2 parameters; it has 2 inputs and 2 parameters"):
        region.call([x], [bias, weight])
    named = TunedRegion(configuration(shared_model()), shared_ports(), label="layer 3")
    with pytest.raises(RuntimeError, match="layer 3: arg1 is"):
        named.call([added, x[1:]], [bias, weight])


def test_ports_of_another_boundary_are_refused() -> None:
    ports, of = shared_ports(), configuration(shared_model())
    key = Port("key", ("key",), ("b", "l", "np"))
    wrong = {
        "a region's inputs are x, added, each once": replace(ports, inputs=ports.inputs[:1]),
        "a region's parameters are weight, bias, each once": replace(ports, parameters=(ports.parameters[0],) * 2),
        "outputs are context, key, each once": replace(ports, outputs=(key, key)),
        "in this order": replace(ports, outputs=ports.outputs[::-1]),
    }
    for message, other in wrong.items():
        with pytest.raises(ConfigurationError, match=message):
            TunedRegion(of, other)


@pytest.mark.slow
def test_a_region_that_is_gone_is_a_clear_error_and_its_plan_goes_with_it() -> None:
    of = copy.copy(configuration(shared_model()))
    region = TunedRegion(of, shared_ports())
    assert any(plan.configuration is of for plan in RegionPlan._made.values())
    operator, arguments = region.operator, region.arguments(*shared_operands())
    outputs = operator(*arguments)[0]
    del region
    gc.collect()
    assert not any(plan.configuration is of for plan in RegionPlan._made.values())
    torch.autograd.backward(outputs, given(outputs))
    with pytest.raises(RuntimeError, match="is gone: compile the model anew"):
        operator(*arguments)


@pytest.mark.parametrize("seed", range(3))
def test_the_compiler_is_told_what_it_gets(seed: int) -> None:
    region = TunedRegion(configuration(shared_model(), seed), shared_ports())
    arguments = region.arguments(*shared_operands())
    operator: Any = region.operator
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    assert RegionResults.parse(arguments[4]) == replace(region.plan.results, in_place=True)


def test_who_watches_operators_sees_one_and_gets_the_same(region: TunedRegion) -> None:
    inputs, parameters = shared_operands()
    plain = region.call(inputs, parameters)
    seen: list[Any] = []

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():  # type: ignore[no-untyped-call]
        watched = region.call(inputs, parameters)
    assert seen[0] is region.operator
    for one, other in zip(plain, watched, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    for found in (plain, watched):
        assert all(y.grad_fn is not None for y in found)


def test_calls_without_gradients_reach_the_region_at_once_unless_somebody_watches(
    region: TunedRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, parameters = shared_operands()
    between: list[set[str]] = []
    usual = TunedRegion.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        files = {Path(frame.filename).parent.name for frame in traceback.extract_stack()}
        between.append(files & {"_library"})
        return usual(*args, **kwargs)

    monkeypatch.setattr(TunedRegion, "forward", forward)
    arguments = region.arguments(inputs, parameters)
    with torch.no_grad():
        found = region.operator(*arguments)[0]
        with FlopCounterMode(display=False):
            watched = region.operator(*arguments)[0]
    (y, _), _ = region.operator(*arguments)
    assert between == [set(), {"_library"}, {"_library"}]
    assert y.requires_grad
    assert not found[0].requires_grad
    for one, other in zip(found, watched, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_compiler_keeps_it_out_of_its_own_cuda_graphs() -> None:
    for operator in (torch.ops.autotuner.tuned_region, torch.ops.autotuner.tuned_region_backward):
        assert torch.Tag.cudagraph_unsafe in operator.default.tags
