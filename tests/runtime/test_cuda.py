"""The runtime on a CUDA device, with and without CUDA graphs."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autotuner
from autotuner.ir.models import load_model
from autotuner.runtime import TrainingStep, TunedModule, TunedWarning, check, masks
from autotuner.runtime.fallbacks import Reason
from autotuner.runtime.masks import additive_key_mask
from autotuner.runtime.peers.on_gpu import OURS, time_on_gpu
from autotuner.runtime.saved_state import workspace_of
from tests.runtime.kinds import pair
from tests.runtime.layers import CUDA, assert_equal, gradients, on_cuda, x_on
from tests.runtime.plans import MASKED, SITES, WITH_DROPOUT, configuration, model

pytestmark = pytest.mark.gpu
graphs = pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "plain"])
STEPS = 5


def replays(layer: TunedModule) -> int:
    """Return how many graphs a layer's idle workspace has."""
    assert layer._bindings
    pool = layer._bindings[0].pool
    workspace = pool.take()
    found = sum(len(row.graphs) for made in workspace.outputs for row in made.sequences)
    pool.give_back(workspace)
    return found


@contextmanager
def without_waiting() -> Iterator[None]:
    """Make whatever waits for the device an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_forward_and_every_gradient_of_a_replay_equal_the_framework(dtype: str, p: float) -> None:
    of = load_model("bert-encoder").instantiate("tiny", dtype=dtype, options=dict.fromkeys(SITES, p))
    report = check(configuration(of, 0, CUDA))
    assert report.ok, report


@graphs
@pytest.mark.parametrize("seed", range(3))
def test_every_step_equals_the_framework(graphs: bool, seed: int) -> None:
    layer, twin = on_cuda(seed=seed, graphs=graphs)
    for step in range(STEPS):
        assert_equal(gradients(layer, x_on(step)), gradients(twin, x_on(step)), 1e-10)
    assert (layer.calls, dict(layer.fallbacks)) == (STEPS, {})
    assert (replays(layer) > 0) == graphs


@graphs
def test_every_step_draws_new_masks_and_the_generators_seed_reproduces_them(graphs: bool) -> None:
    layer, _ = on_cuda(model(p=WITH_DROPOUT), graphs=graphs)
    runs: dict[int, list[dict[str, Tensor]]] = {}
    for seed in (1, 2, 1, 2, 1, 2):
        torch.manual_seed(seed)
        run = [gradients(layer, x_on()) for _ in range(3)]
        for one, other in zip(runs.setdefault(seed, run), run, strict=True):
            assert_equal(one, other, 0.0)
    drawn = [found["y"] for run in runs.values() for found in run]
    assert all(not torch.equal(drawn[i], drawn[j]) for i in range(6) for j in range(i))


@graphs
def test_nothing_waits_for_the_device(graphs: bool) -> None:
    layer, _ = on_cuda(graphs=graphs)
    x, grad = x_on().requires_grad_(), x_on(1)
    for _ in range(3):
        layer.zero_grad()
        x.grad = None
        layer(x).backward(grad)
    with without_waiting():
        for _ in range(3):
            layer.zero_grad()
            x.grad = None
            layer(x).backward(grad)
    assert layer.calls == 6


@graphs
def test_a_mask_is_looked_at_for_examples_of_padding_alone_and_nothing_else_waits(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _ = on_cuda(MASKED, graphs=graphs)
    padding = (torch.arange(6) >= torch.tensor([[4], [6]])).to(CUDA)
    x, grad = x_on().requires_grad_(), x_on(1)
    for _ in range(3):
        layer(x, src_key_padding_mask=padding).backward(grad)
    monkeypatch.setattr(masks._Facts, "leaves_keys", lambda *_: True)
    with without_waiting():
        for _ in range(3):
            layer.zero_grad()
            x.grad = None
            layer(x, src_key_padding_mask=padding).backward(grad)
    assert layer.calls == 6


@graphs
def test_gradients_accumulate_and_kept_ones_stay(graphs: bool) -> None:
    layer, twin = on_cuda(graphs=graphs)
    kept = []
    for round_ in range(3):
        for module in (layer, twin):
            module.zero_grad()
            for step in range(4):
                module(x_on(4 * round_ + step)).square().sum().backward()
        grads = [p.grad for p in layer.parameters() if p.grad is not None]
        for one, other in zip(grads, twin.parameters(), strict=True):
            torch.testing.assert_close(one, other.grad, rtol=1e-10, atol=1e-10)
        kept.append((grads, [grad.clone() for grad in grads]))
    for grads, copies in kept:
        assert all(torch.equal(grad, value) for grad, value in zip(grads, copies, strict=True))


@graphs
def test_a_retained_graph_gives_the_same_gradients_again(graphs: bool) -> None:
    layer, _ = on_cuda(model(p=WITH_DROPOUT), graphs=graphs)
    leaves = [*layer.parameters()]
    for _ in range(3):
        y = layer(x_on()).square().sum()
        runs = [torch.autograd.grad(y, leaves, retain_graph=True) for _ in range(4)]
        for run in runs[1:]:
            assert all(torch.equal(first, later) for first, later in zip(runs[0], run, strict=True))
            assert all(a.data_ptr() != b.data_ptr() for a, b in zip(runs[0], run, strict=True))


@graphs
def test_two_forwards_before_their_backwards_keep_their_own(graphs: bool) -> None:
    layer, twin = on_cuda(graphs=graphs)
    for _ in range(STEPS):
        found = []
        for module in (layer, twin):
            xs = [x_on(i).requires_grad_() for i in range(2)]
            ys = [module(x) for x in xs]
            for y in ys:
                y.square().sum().backward()
            found.append([x.grad for x in xs])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@graphs
def test_a_caller_may_capture_a_whole_step(graphs: bool) -> None:
    layer, twin = on_cuda(graphs=graphs)
    x, grad = x_on().requires_grad_(), x_on(1)
    leaves = [x, *layer.parameters()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        layer(x).backward(grad)

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    whole = torch.cuda.CUDAGraph()
    with torch.cuda.graph(whole):
        step()
    captured = [leaf.grad for leaf in leaves]
    for seed in range(3):
        with torch.no_grad():
            x.copy_(x_on(seed))
        whole.replay()
        found = [grad.clone() for grad in captured if grad is not None]
        between = x_on(7).requires_grad_()
        y = layer(between)  # plain calls go on beside it, and neither disturbs the other
        whole.replay()
        y.backward(grad)
        twin_x, twin_between = (t.detach().clone().requires_grad_() for t in (x, between))
        wanted = torch.autograd.grad(twin(twin_x), [twin_x, *twin.parameters()], grad)
        assert between.grad is not None
        (other,) = torch.autograd.grad(twin(twin_between), twin_between, grad)
        torch.testing.assert_close(between.grad, other, rtol=1e-10, atol=1e-10)
        for one, value in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, value, rtol=1e-10, atol=1e-10)


@graphs
def test_steps_on_alternating_streams_equal_the_framework(graphs: bool) -> None:
    of = load_model("bert-encoder").instantiate("tiny", dtype="float32", options=dict.fromkeys(SITES, 0.0))
    layer, twin = on_cuda(of, graphs=graphs)
    x = torch.randn(4, 64, 128, device=CUDA)
    wanted = twin(x).detach()
    streams = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for number in range(12):
        stream = streams[number % 3]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000 if number % 2 else 0)  # type: ignore[no-untyped-call]
            y = layer(x)
            y.sum().backward()
            found = y.detach().clone()
        del y
        stream.synchronize()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        layer.zero_grad()
    assert layer.calls == 12


@graphs
def test_training_equals_the_framework(graphs: bool) -> None:
    layer, twin = on_cuda(graphs=graphs, seed=2)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01) for module in (layer, twin)]
    for step in range(6):
        for module, optimizer in zip((layer, twin), optimizers, strict=True):
            optimizer.zero_grad()
            module(x_on(step)).square().mean().backward()
            optimizer.step()
    for (name, one), other in zip(layer.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8, msg=name)


@graphs
def test_kept_outputs_without_gradients_are_not_overwritten(graphs: bool) -> None:
    layer, _ = on_cuda(graphs=graphs)
    with torch.inference_mode():
        for _ in range(2):
            outputs = [layer(x_on(i)) for i in range(5)]
            for i, y in enumerate(outputs):
                torch.testing.assert_close(layer(x_on(i)), y, rtol=0, atol=0)


@graphs
def test_a_plain_training_step_runs_on_the_device(graphs: bool) -> None:
    found = configuration(model(p=WITH_DROPOUT), 0, CUDA)
    graph = found.graph()
    names = [name for name, tensor in graph.tensors.items() if tensor.role == "parameter"]
    step = TrainingStep(
        found, {n: torch.randn(graph.shape(n), dtype=torch.float64, device=CUDA) for n in names}, graphs=graphs
    )
    runs = []
    for _ in range(4):
        torch.manual_seed(0)
        y = step.forward(x_on()).clone()
        runs.append({"y": y} | {n: g.clone() for n, g in step.backward(x_on(1)).items()})
    for run in runs[1:]:
        assert_equal(runs[0], run, 0.0)


def test_a_kernel_that_cannot_be_captured_leaves_plain_steps_and_a_generator_that_draws() -> None:
    other, _ = on_cuda(model(p=WITH_DROPOUT))
    for _ in range(4):
        gradients(other, x_on())
    layer, twin = on_cuda()
    y = layer(x_on())
    workspace = workspace_of(y)
    row = workspace.outputs.by_phase["forward"][0].sequence
    row.calls = [*row.calls, lambda: float(workspace.arena._own[0])]  # reads a value back, which waits for the device
    del y
    with pytest.warns(TunedWarning, match="without CUDA graphs") as warned:
        found = [gradients(layer, x_on(step)) for step in range(STEPS)]
    assert len(warned) == 1
    for step, one in enumerate(found):
        assert_equal(one, gradients(twin, x_on(step)), 1e-10)
    runs = []
    for _ in range(3):
        torch.manual_seed(5)
        runs.append([gradients(other, x_on()) for _ in range(2)])
    for run in runs[1:]:
        for one, again in zip(runs[0], run, strict=True):
            assert_equal(one, again, 0.0)
    assert not torch.equal(runs[0][0]["y"], runs[0][1]["y"])


@graphs
def test_autocast_and_an_input_elsewhere_run_the_original(graphs: bool) -> None:
    layer, twin = on_cuda(model(dtype="float32"), graphs=graphs)
    x = x_on(dtype=torch.float32)
    with pytest.warns(TunedWarning, match="autocast"), torch.autocast(CUDA, torch.bfloat16):
        torch.testing.assert_close(layer(x), twin(x))
    assert dict(layer.fallbacks) == {"autocast": 1}
    layer.cpu()
    with pytest.warns(TunedWarning, match="on cpu"):
        torch.testing.assert_close(layer(x.cpu()), twin.cpu()(x.cpu()), rtol=1e-4, atol=1e-4)
    layer.to(CUDA)
    torch.testing.assert_close(layer(x), twin.to(CUDA)(x), rtol=1e-4, atol=1e-4)
    assert layer.calls == 1


@graphs
def test_a_copy_trains_on_its_own(graphs: bool) -> None:
    layer, twin = on_cuda(graphs=graphs)
    for _ in range(3):
        gradients(layer, x_on())
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.get_parameter("linear1.weight").zero_()
    for _ in range(3):
        assert_equal(gradients(layer, x_on()), gradients(twin, x_on()), 1e-10)
        assert not torch.equal(gradients(other, x_on())["y"], gradients(layer, x_on())["y"])


def test_operands_in_the_arena_lie_at_multiples_of_256_bytes() -> None:
    layer, _ = on_cuda()
    workspace = workspace_of(layer(x_on()))
    starts = [buffer.start_bytes for buffer in workspace.plan.buffers if buffer.role == "arena"]
    assert not any((workspace.arena._own.data_ptr() + start) % 256 for start in starts)


def over_keys(mask: Tensor, asker: object, dtype: torch.dtype | None = torch.float32) -> Tensor | Reason | None:
    return additive_key_mask(mask, (2, 6), dtype, keeps=True, asker=asker)


def test_a_mask_is_read_once_for_all_layers() -> None:
    keeps = (torch.arange(6) < torch.tensor([[4], [6]])).to(CUDA)[:, None, None]
    for mask in (keeps, keeps.expand(2, 1, 6, 6), keeps.expand(2, 1, 6, 6).contiguous()):
        first = over_keys(mask, "one")
        with without_waiting():
            again = over_keys(mask, "other")
        assert isinstance(first, Tensor)
        assert isinstance(again, Tensor)
        assert torch.equal(first, again)
    mask[0, 0, 3, 0] = False
    assert isinstance(over_keys(mask, "third"), Reason)


def test_a_mask_that_leaves_a_sequence_no_key_is_refused() -> None:
    keeps = torch.ones(2, 1, 1, 6, dtype=torch.bool, device=CUDA)
    keeps[1] = False
    for mask in (keeps, torch.zeros(2, 1, 1, 6, device=CUDA).masked_fill_(~keeps, torch.finfo(torch.float32).min)):
        found = over_keys(mask, "one")
        assert isinstance(found, Reason)
        assert found.key == "padding"


def test_whether_a_mask_masks_anything_is_asked_once_for_all_layers_and_again_by_the_same_layer() -> None:
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool, device=CUDA)
    assert over_keys(mask, "one", None) is None
    with without_waiting():
        assert over_keys(mask, "other", None) is None
    mask.data[0, 0, :, 5] = False  # its version stays
    assert isinstance(over_keys(mask, "one", None), Reason)


@pytest.mark.parametrize("kind", ["encoder", "bert"])
def test_in_a_whole_step_that_a_caller_captures_a_mask_costs_no_fallback(kind: str) -> None:
    layer, twin = pair(kind, device=CUDA)
    name = "attention_mask" if kind == "bert" else "src_key_padding_mask"
    none = torch.zeros(2, 6, dtype=torch.bool, device=CUDA)
    x, grad = x_on().requires_grad_(), x_on(1)

    def step() -> Tensor:
        mask = none | False  # made inside, as models make it
        y: Tensor = layer(x, **{name: ~mask[:, None, None].expand(2, 1, 6, 6) if kind == "bert" else mask})
        torch.autograd.backward(y, grad)
        return y

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(3):
            layer.zero_grad()
            step()
        layer.zero_grad()
    torch.cuda.synchronize()
    with warnings.catch_warnings(), torch.cuda.graph(graph, stream=side):
        warnings.simplefilter("ignore", TunedWarning)
        y = step()
    for seed in range(3):
        with torch.no_grad():
            x.copy_(x_on(seed))
        graph.replay()
        torch.testing.assert_close(y, twin(x), rtol=1e-10, atol=1e-10)
    assert not layer.fallbacks


def test_gradients_are_handed_over_without_a_copy_and_memory_stays_the_same() -> None:
    layer, _ = on_cuda()
    allocated = []
    x, grad = x_on(), x_on(1)
    for _ in range(8):
        layer.zero_grad()
        layer(x).backward(grad)
        allocated.append(torch.cuda.memory_allocated())
    assert len(set(allocated[4:])) == 1
    assert layer._bindings
    assert layer._bindings[0].pool.made == 1
    (made,) = layer._bindings[0].pool.take().outputs.by_phase["backward"]
    handed = {tensor.data_ptr() for tensor in made.handed}
    found: list[Any] = [parameter.grad for parameter in layer.parameters()]
    assert all(tensor.data_ptr() in handed for tensor in found)


def test_peers_are_timed_with_and_without_a_graph_of_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    found, peaks, beside = time_on_gpu(configuration(model(dtype="bfloat16", p=0.1), 0, CUDA), samples=2)
    assert {*OURS, "eager", "eager, captured", "sdpa flash", "sdpa flash, captured"} <= {*found}
    assert all(len(times) == 2 and min(times) > 0 and peaks[name] for name, times in found.items())
    assert any(name.startswith("torch.compile") and name.endswith(", captured") for name in found)
    plan_us = min(found["plan, captured"])
    assert 0 < beside.overhead_us < 0.5 * plan_us  # the plan has 30 kernels and more, and no parameter that is copied
    assert 0 <= beside.switching_us < 0.5 * plan_us
    assert 0.8 < beside.slowdown < 1.25


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fresh_answer_is_predicted_within_a_tenth_and_has_no_doubt(tmp_path: Path) -> None:
    found = autotuner.tune(
        "bert-encoder:base", dtype="bfloat16", device="cuda", database=tmp_path / "timings.sqlite",
        options={"attention_dropout": 0.1},
    )  # fmt: skip
    assert found.measured is not None
    assert abs(found.measured.predicted_over_measured(found.kernels_us)) < 0.1
    assert found.doubts == ()
    assert found.measured.overhead_us < 0.1 * found.measured.plan_us
