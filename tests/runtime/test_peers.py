"""The peers' layers and what is made of their timings; the timing itself is tested where there is a device."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count, pairwise, repeat

import pytest
import torch
from torch import nn

from autotuner.ir.models import Model
from autotuner.runtime import TunedWarning, time_peers
from autotuner.runtime.framework import MadeUpCall, encoder_layer
from autotuner.runtime.made_up_region import MadeUpModelCall
from autotuner.runtime.model_module import ModelOperators
from autotuner.runtime.peers import as_measured, beside_kernels
from autotuner.runtime.peers.beside_kernels import BesideKernels, slowdown
from autotuner.runtime.peers.on_gpu import (
    CAPTURED,
    COMPILED,
    GRAPHS,
    OURS,
    PLAN,
    add,
    fastest,
    peers_on_gpu,
    time_on_gpu,
)
from autotuner.runtime.peers.stacked_layer import BACKENDS, stacked_layer
from autotuner.runtime.peers.training_loop import TrainingLoop, balanced_orders, rounds
from autotuner.runtime.saved_state import workspace_of
from scripts.bench.all_peers import SideTiming, timing
from scripts.bench.jax_layer import WITHOUT_DROPOUT
from tests.runtime.bert_layers import bert_layer
from tests.runtime.layers import assert_equal, batch, gradients, tuned
from tests.runtime.made_up_device import instead_of_the_cpu
from tests.runtime.plans import MASKED, configuration, model
from tests.runtime.regions import shared_model

pytestmark = pytest.mark.slow


def test_a_stacked_layer_equals_the_frameworks_with_the_same_parameters() -> None:
    stacked, layer = stacked_layer(MASKED, device="cpu"), encoder_layer(MASKED)
    call = MadeUpCall.of(MASKED)
    found, wanted = (gradients(module, call.x, **call.masks) for module in (stacked, layer))
    renamed = {name.replace("self_attn.", ""): value for name, value in wanted.items()}
    assert_equal(found, renamed, 1e-10)


def test_a_stacked_layer_drops_at_all_four_sites_and_nothing_in_eval_mode() -> None:
    of = model(p=0.3)
    stacked, x = stacked_layer(of, device="cpu"), MadeUpCall.of(of).x
    assert not torch.equal(stacked(x), stacked(x))
    assert stacked.attention_dropout == 0.3
    stacked.eval()
    torch.testing.assert_close(stacked(x), encoder_layer(of).eval()(x))


def test_the_fastest_attention_kernel_is_found_in_either_form() -> None:
    times_us = {"sdpa flash": 9, "sdpa cudnn": 8, "sdpa flash, captured": 5, "sdpa cudnn, captured": 6, "eager": 1}
    assert fastest(times_us, "sdpa ") == "flash"
    assert fastest({}, "sdpa ") is None


def test_each_side_comes_as_often_behind_each_other_one() -> None:
    order: list[str] = []

    def turn(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = rounds({name: partial(turn, name) for name in "abc"}, 6)
    assert "".join(order) == "abc" + "bca" + "cab" + "cba" + "acb" + "bac"
    assert found["a"] == [1, 6, 8, 12, 13, 17]
    for sides in range(2, 8):
        orders = balanced_orders(sides)
        behind = Counter(pair for each in orders for pair in pairwise(each))
        assert len(behind) == sides * (sides - 1)
        assert len(set(behind.values())) == 1
        assert all(sorted(each) == [*range(sides)] for each in orders)


def test_rounds_end_once_every_median_is_known_well() -> None:
    def turn(times: Iterator[float]) -> float:
        return next(times)

    def taken(off: float, samples: int = 30, settled_share: float = 0.005, beside: float = 99.0) -> int:
        noisy = (100 * (1 + off * (-1) ** number) for number in count())
        found = rounds({"a": partial(turn, repeat(beside)), "b": partial(turn, noisy)}, samples, settled_share)
        assert len(found["a"]) == len(found["b"])
        return len(found["b"])

    assert taken(0.004) == 8
    assert taken(0.006) == 30
    assert taken(0.004, samples=5) == 5
    assert taken(0.0, settled_share=0.0) == 30
    assert taken(0.015, beside=50.0) == 8  # twice the least one
    assert taken(0.017, beside=50.0) == 30


def test_a_sides_clock_is_the_median_of_its_turns_and_none_where_nobody_says() -> None:
    assert timing("eager", [3, 1, 2], 7, [1980, 1700, 1650]) == SideTiming(2, 1, 7, sm_clock_mhz=1700)
    assert timing("eager", [3, 1, 2], 7, []) == SideTiming(2, 1, 7)
    assert timing(WITHOUT_DROPOUT, [1], None, []).computes_less


def test_a_peer_that_fails_is_left_out_with_its_reason_and_the_plan_is_not() -> None:
    def fails() -> nn.Module:
        raise RuntimeError("no such kernel\nand more")

    with pytest.warns(TunedWarning, match=r"^sdpa cudnn is not among the sides: no such kernel$"):
        add({}, "sdpa cudnn", fails, partial(MadeUpCall.of, model()))
    with pytest.raises(RuntimeError, match="no such kernel"):
        add({}, PLAN, fails, partial(MadeUpCall.of, model()))


def test_the_captured_form_of_the_plan_stands_for_it_as_what_lies_beside_its_kernels_is_of_that_form() -> None:
    times_us = {
        PLAN: [9.0, 8.0, 9.0],
        GRAPHS: [4.5, 4.4, 4.5],
        PLAN + CAPTURED: [5.0, 4.0, 5.0],
        "eager": [9.0, 10.0, 11.0],
    }
    beside = BesideKernels(0.5, 0.25, 1.1)
    found = as_measured(times_us, {PLAN: 90, GRAPHS: 70, PLAN + CAPTURED: 50, "eager": None}, beside)
    assert (found.plan_us, found.overhead_us, found.peak_bytes, found.samples) == (5, 0.5, 50, 3)
    assert (found.switching_us, found.slowdown) == (0.25, 1.1)
    assert found.ratios == {"eager": 2.0}
    assert found.peers_peak_bytes == {"eager": None}
    del times_us[PLAN + CAPTURED]
    assert as_measured(times_us, {PLAN: 90, GRAPHS: 70, "eager": None}, BesideKernels(0.5)).plan_us == 4.5


def test_on_a_device_with_graphs_a_plan_and_its_peers_are_timed_by_its_clock_call_by_call_and_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, of = instead_of_the_cpu(monkeypatch), model(dtype="float32")
    for name, value in {"PAUSE_S": 0.0, "EXTENT": 4, "REPEATS": 1, "TURNS": 3}.items():
        monkeypatch.setattr(beside_kernels, name, value)
    monkeypatch.setattr(torch, "compile", lambda layer, **_: layer)
    with pytest.warns(TunedWarning, match="sdpa cudnn is not among the sides"):
        peers = peers_on_gpu(of, "cpu")
    assert {"eager", "eager, captured", "sdpa flash", "sdpa flash, captured"} <= set(peers)
    assert [name.partition(COMPILED)[2] in BACKENDS for name in peers if name.startswith(COMPILED)] != []
    captures = device.captures
    times_us, peaks_bytes, beside = time_on_gpu(configuration(of), 2, peers)
    assert set(times_us) == {*OURS, *peers}
    assert all(len(us) == 2 and min(us) > 0 and peaks_bytes[name] for name, us in times_us.items())
    # the plan's own graphs, its captured step, that without kernels, and small kernels: together, and each alone
    assert device.captures == captures + 2 + 1 + 1 + 1 + len(beside_kernels._small_kernels(device.device))
    assert beside.overhead_us > 0
    assert device.replays > device.captures


class Cooled:
    """A side whose clock is at its highest in short rounds; the first finds it lowered."""

    def __init__(self) -> None:
        self._us = [110.0]

    def brief_us(self) -> float:
        return self._us.pop() if self._us else 100.0


def test_load_that_lasts_is_compared_with_short_rounds_of_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_kernels, "PAUSE_S", 0.0)
    assert slowdown(125.0, Cooled()) == 1.25


def test_without_kernels_parameters_are_copied_and_every_workspace_of_the_pool_leaves_its_kernels_out() -> None:
    of, layer = model(), bert_layer()
    made = next(each for seed in range(20) if _copies(each := tuned(layer, configuration(of, seed))))
    loop = TrainingLoop(made, MadeUpCall.of(of))
    loop.warm()
    loop.skip_kernels()
    kept = [made(batch()) for _ in range(3)]  # three forwards at a time take three workspaces
    workspaces = [workspace_of(y) for y in kept]
    assert len({id(workspace) for workspace in workspaces}) == 3
    assert all(workspace.skips_kernels for workspace in workspaces)
    with torch.no_grad():
        layer.get_parameter("attention.self.query.weight").fill_(7.0)
    again = workspace_of(made(batch()))
    assert any((base == 7.0).any() for base in again.parameters.bases.values())


def _copies(layer: nn.Module) -> bool:
    """Say whether a tuned layer copies parameters in each forward: those that its plan wants stacked."""
    return bool(workspace_of(layer(batch())).parameters.copying)


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_plan_of_any_model_is_timed_beside_its_operators_and_a_region_by_itself(is_captured: bool) -> None:
    of = shared_model()
    if is_captured:
        name = {"name": "captured-shared"}
        of = Model.from_json(of.to_json() | name | {"definition": {**of.definition, **name}})
    found = time_peers(configuration(of), samples=8)
    assert set(found.peers_us) == (set() if is_captured else {"eager operators", "compiled operators"})
    assert 0 < found.overhead_us < found.plan_us
    assert found.samples == 8
    assert found.peak_bytes is not None
    elements = sum(t.nbytes for t in MadeUpModelCall.of(of).grads)
    assert elements < found.peak_bytes < 100 * elements


def test_a_made_up_call_asks_for_the_gradients_that_training_makes() -> None:
    of = shared_model()
    call, module = MadeUpModelCall.of(of), ModelOperators(of, "cpu")
    call.step(module)
    assert [leaf.grad is not None for leaf in (*call.leaves, *module.parameters())] == [True] * 3
    assert len(call.inputs) == 2
