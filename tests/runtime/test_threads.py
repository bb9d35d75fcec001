"""Tuned layers and regions that several threads call at a time."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError

import pytest
import torch
from torch import Tensor

from autotuner.ir.device import CUDA
from autotuner.runtime.region import TunedRegion
from autotuner.runtime.scratch import Scratch
from autotuner.runtime.workspace import Workspace
from tests.runtime.kinds import pair
from tests.runtime.plans import TINY, configuration
from tests.runtime.regions import shared, shared_model, shared_operands, shared_ports

THREADS, CALLS, INPUTS = 4, 60, 3


@pytest.fixture(autouse=True)
def interleaved() -> Iterator[None]:
    """Have threads take turns as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(step: Callable[[int], list[Tensor]], wanted: list[list[Tensor]]) -> None:
    """Check that a step on each of several inputs gives what is wanted, in each of several threads."""
    begin = Barrier(THREADS)

    def run(thread: int) -> None:
        begin.wait()
        for call in range(CALLS):
            number = (thread + call) % len(wanted)
            torch.testing.assert_close(step(number), wanted[number], rtol=1e-9, atol=1e-9)

    with ThreadPoolExecutor(THREADS) as executor:
        for done in [executor.submit(run, thread) for thread in range(THREADS)]:
            done.result()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param(CUDA, marks=pytest.mark.gpu)])
def test_one_tuned_layer_trains_in_several_threads(device: str) -> None:
    tuned, twin = pair("encoder", device=device)
    generator = torch.Generator().manual_seed(0)
    shape = (TINY["b"], TINY["l"], TINY["h"])
    xs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for _ in range(INPUTS)]

    def step(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])]

    wanted = [step(twin, x) for x in xs]
    in_threads(lambda number: step(tuned, xs[number]), wanted)


@pytest.mark.slow
def test_one_region_trains_in_several_threads_with_the_parameters_of_several_models() -> None:
    region = TunedRegion(configuration(shared_model()), shared_ports())
    models = [shared_operands(number) for number in range(INPUTS)]

    def step(run: Callable[..., Sequence[Tensor]], number: int) -> list[Tensor]:
        (added, x), parameters = models[number]
        leaf = x.detach().clone().requires_grad_()
        outputs = run([added, leaf], parameters)
        loss = torch.stack([y.square().sum() for y in outputs]).sum()
        return [*(y.detach() for y in outputs), *torch.autograd.grad(loss, [leaf, *parameters])]

    wanted = [step(shared, number) for number in range(INPUTS)]
    in_threads(lambda number: step(region.call, number), wanted)


@pytest.mark.slow
def test_two_threads_that_take_at_the_same_moment_get_a_workspace_each(monkeypatch: pytest.MonkeyPatch) -> None:
    region = TunedRegion(configuration(shared_model()), shared_ports())
    with torch.no_grad():
        leases = [region.forward(*shared_operands(), in_place=False)[1]]
        pool = leases.pop().pool
    meet = Barrier(2, timeout=0.3)

    def look(workspace: Workspace) -> Scratch | None:
        """Wait, where a workspace is looked at, until another thread looks at one; where none can, go on."""
        with suppress(BrokenBarrierError):
            meet.wait()
        found: Scratch | None = workspace.__dict__["scratch"]
        return found

    def keep(workspace: Workspace, scratch: Scratch | None) -> None:
        workspace.__dict__["scratch"] = scratch

    monkeypatch.setattr(Workspace, "scratch", property(look, keep), raising=False)
    with ThreadPoolExecutor(2) as executor:
        taken = [asked.result() for asked in [executor.submit(pool.take) for _ in range(2)]]
    assert len(set(taken)) == pool.made == 2


def test_a_workspace_that_is_given_back_inside_of_take_is_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease ends wherever the garbage collector runs."""
    region = TunedRegion(configuration(shared_model()), shared_ports())
    with torch.no_grad():
        leases = [region.forward(*shared_operands(), in_place=False)[1]]
        pool = leases[0].pool
        seen = pool._is_captured

        def collecting() -> bool:
            leases.clear()
            return seen()

        monkeypatch.setattr(pool, "_is_captured", collecting)
        first = pool.take()
        assert pool.made == 2
        assert pool.take() is not first
        assert pool.made == 2
