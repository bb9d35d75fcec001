"""A dropout mask that is held between forward and backward as a seed, as bits or as bytes, in configurations made by
hand: forward expands a seed, and backward gets the same mask from what was held."""

from dataclasses import replace

import pytest
import torch

from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import make_plan
from autotuner.plan.step import AGAIN, Step
from autotuner.runtime import check
from autotuner.runtime.training_step import TrainingStep
from autotuner.space import Choice
from tests.runtime.plans import ODD, WITH_DROPOUT, model, solved

pytestmark = pytest.mark.slow

MASK = "output_dropout_mask"
RAW = "blh"
# 3 * 5 * 21 = 315 elements: parts of 79, 39 bytes of bits and three elements.
OF = model(ODD, dtype="float32", output_dropout=WITH_DROPOUT)
# What is held beside the raw mask of forward, the kernel that makes it, and the one that makes a raw mask of it.
WAYS = {
    "seed": ("seed", "", "inductor_expand", 8),
    "bits": ("bit", "inductor_pack", "inductor_unpack", 40),
    "bytes": ("byte", "inductor_cast", "inductor_cast", 315),
}


def conversion(kernel: str, source: tuple[str, str], target: tuple[str, str], phase: str) -> Step:
    return Step(
        operators=(), recomputed=(), phase=phase, inputs=(source,), outputs=(target,), kernel=kernel, params=(),
        adjacent=(), predicted_us=1.0, bound_us=0.0, low_us=1.0, high_us=1.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def found() -> Configuration:
    """A configuration whose mask is raw, in the declared order, for all its readers."""

    def cost(choice: Choice) -> float | None:
        if MASK not in choice.by_tensor:
            return None
        return 1e-3 if choice.by_tensor[MASK] == RAW and len(choice.cover.operators) == 1 else 1e6

    return solved(OF, 0, cost=cost)


def expanded(found: Configuration) -> Configuration:
    """Return a configuration that draws a seed, expands it in forward, and keeps the raw mask for backward."""
    steps = list(found.steps)
    place = next(i for i, step in enumerate(steps) if (MASK, RAW) in step.outputs)
    steps[place] = replace(steps[place], kernel="torch_seed", params=(), outputs=((MASK, f"{RAW}:seed"),))
    steps.insert(place + 1, conversion("inductor_expand", (MASK, f"{RAW}:seed"), (MASK, RAW), "forward"))
    return replace(found, steps=tuple(steps))


def held(found: Configuration, way: str) -> Configuration:
    """Return a configuration that holds the mask in another way, and makes a raw one of it again in backward."""
    storage, packs, unpacks, _ = WAYS[way]
    steps: list[Step] = []
    for step in expanded(found).steps:
        reads = any(name == MASK for name, _ in step.inputs)
        if reads and step.phase == "backward":
            again = (AGAIN + MASK, RAW)
            if not any(again in made.outputs for made in steps):
                steps.append(conversion(unpacks, (MASK, f"{RAW}:{storage}"), again, "backward"))
            step = replace(step, inputs=tuple(again if name == MASK else (name, form) for name, form in step.inputs))
        steps.append(step)
        if packs and step.kernel == "inductor_expand":
            steps.append(conversion(packs, (MASK, RAW), (MASK, f"{RAW}:{storage}"), "forward"))
    return replace(found, steps=tuple(steps))


def run(found: Configuration, seed: int) -> dict[str, torch.Tensor]:
    """Return the output and all gradients of one training step."""
    draw = torch.Generator().manual_seed(7)
    graph = found.graph()
    parameters = {
        name: torch.randn(graph.shape(name), generator=draw)
        for name, t in graph.tensors.items()
        if t.role == "parameter"
    }
    step = TrainingStep(found, parameters)
    torch.manual_seed(seed)
    y = step.forward(torch.randn(graph.shape("x"), generator=draw))
    return {"y": y} | step.backward(torch.randn(graph.shape("y"), generator=draw))


@pytest.mark.parametrize("way", WAYS)
def test_backward_gets_the_mask_of_forward_however_it_was_held(found: Configuration, way: str) -> None:
    raw, other = run(expanded(found), 3), run(held(found, way), 3)
    assert raw.keys() == other.keys()
    for name, tensor in raw.items():
        assert torch.equal(tensor, other[name]), name
    assert not torch.equal(run(held(found, way), 4)["grad_x"], raw["grad_x"])


@pytest.mark.parametrize("way", WAYS)
def test_only_what_is_held_of_the_mask_takes_memory_between_forward_and_backward(
    found: Configuration, way: str
) -> None:
    storage, _, _, size_bytes = WAYS[way]
    plan = make_plan(held(found, way))
    kept = {place: plan.buffers[number].size_bytes for number in plan.saved for place in plan.buffers[number].offsets}
    assert {place: size for place, size in kept.items() if place[0] == MASK} == {(MASK, f"{RAW}:{storage}"): size_bytes}
    raw = make_plan(expanded(found))
    assert (MASK, RAW) in {place for number in raw.saved for place in raw.buffers[number].offsets}


@pytest.mark.parametrize("way", WAYS)
def test_the_check_against_the_graph_reads_the_mask_as_it_is_held(found: Configuration, way: str) -> None:
    report = check(held(found, way))
    assert report.ok, report.worst
    assert list(report.masks) == [MASK]
