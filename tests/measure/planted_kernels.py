"""Kernels with one planted fault each, for tests of the measuring process. They all claim to compute `add` or masks."""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from autotuner.ir.records import Call, Candidate, Subgraph
from autotuner.kernels.registry import KERNELS, Kernel

Tensors = Sequence[Tensor]
Run = Callable[[], object]


def good(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    def run() -> None:
        torch.add(inputs[0], inputs[1], out=outputs[0])

    return run


def counted(call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    """Writes a character for each operand set that it is built for."""
    with Path(str(dict(call.candidate.params)["mark"])).open("a") as mark:
        mark.write("|")
    return good(call, inputs, outputs)


def roomy(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    """Allocates as much as its output has, and gives it back."""

    def run() -> None:
        outputs[0].copy_(inputs[0] + inputs[1])

    return run


def slow(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    def run() -> None:
        time.sleep(0.002)
        torch.add(inputs[0], inputs[1], out=outputs[0])

    return run


def wrong(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    def run() -> None:
        torch.add(inputs[0], inputs[1], out=outputs[0])
        outputs[0][1, 2] += 0.01

    return run


def not_a_number(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    def run() -> None:
        torch.add(inputs[0], inputs[1], out=outputs[0])
        outputs[0][0, 1] = float("nan")

    return run


def unwritten(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    def run() -> None:
        torch.add(inputs[0][1:], inputs[1][1:], out=outputs[0][1:])

    return run


def modifies(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    def run() -> None:
        torch.add(inputs[0], inputs[1], out=outputs[0])
        inputs[1].add_(1)

    return run


def spills(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    out = outputs[0]
    beside = out.as_strided(out.shape, out.stride(), 0)

    def run() -> None:
        torch.add(inputs[0], inputs[1], out=out)
        beside.zero_()

    return run


def raises(_call: Call, _inputs: Tensors, _outputs: Tensors) -> Run:
    def run() -> None:
        raise ValueError("planted")

    return run


def hangs(_call: Call, _inputs: Tensors, _outputs: Tensors) -> Run:
    def run() -> None:
        time.sleep(600)

    return run


def segfaults(_call: Call, _inputs: Tensors, _outputs: Tensors) -> Run:
    def run() -> None:
        ctypes.string_at(0)

    return run


def exits(_call: Call, _inputs: Tensors, _outputs: Tensors) -> Run:
    def run() -> None:
        os._exit(7)

    return run


def greedy(_call: Call, _inputs: Tensors, _outputs: Tensors) -> Run:
    def run() -> None:
        torch.empty(1 << 50)

    return run


def exits_once(call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    """Ends the process the first time that it is built, and is good from then on."""
    mark = Path(str(dict(call.candidate.params)["mark"]))

    def run() -> None:
        if not mark.exists():
            mark.touch()
            os._exit(7)
        torch.add(inputs[0], inputs[1], out=outputs[0])

    return run


def resizes(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    return lambda: torch.add(inputs[0], inputs[1], out=outputs[0].resize_(1, 0)).resize_(2, 64)


def slices(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    """Reads three inputs as one tensor, which works only where they lie behind each other."""
    first = inputs[0]
    step = inputs[1].storage_offset() - first.storage_offset()
    whole = first.as_strided((3, *first.shape), (step, *first.stride()))

    def run() -> None:
        torch.sum(whole, 0, out=outputs[0])

    return run


def draws(_call: Call, _inputs: Tensors, outputs: Tensors) -> Run:
    def run() -> None:
        if outputs[0].dtype == torch.bool:
            outputs[0].bernoulli_(0.75)
        else:
            outputs[0].bernoulli_(0.75).div_(0.75)

    return run


def draws_too_few(_call: Call, _inputs: Tensors, outputs: Tensors) -> Run:
    def run() -> None:
        outputs[0].bernoulli_(0.5)

    return run


def draws_half(_call: Call, _inputs: Tensors, outputs: Tensors) -> Run:
    def run() -> None:
        outputs[0][: len(outputs[0]) // 2].bernoulli_(0.75)

    return run


def draws_the_same(_call: Call, _inputs: Tensors, outputs: Tensors) -> Run:
    generator = torch.Generator()

    def run() -> None:
        outputs[0].bernoulli_(0.75, generator=generator.manual_seed(1))

    return run


def drops(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    """Mask and dropout in one: returns the mask that it drew."""
    mask, out = outputs

    def run() -> None:
        mask.bernoulli_(0.75).div_(0.75)
        torch.mul(inputs[0], mask, out=out)

    return run


def drops_byte(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    x, mask = inputs

    def run() -> None:
        torch.mul(x, mask, out=outputs[0]).mul_(1 / 0.75)

    return run


def copies_unturned(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    return lambda: outputs[0].copy_(inputs[0])


def packs(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    places = torch.arange(8, dtype=torch.uint8)

    def run() -> None:
        outputs[0].copy_(((inputs[0].view(-1, 8) != 0).to(torch.uint8) << places).sum(1))

    return run


def packs_backwards(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    """Puts the first element of eight into the highest bit."""
    places = torch.arange(7, -1, -1, dtype=torch.uint8)

    def run() -> None:
        outputs[0].copy_(((inputs[0].view(-1, 8) != 0).to(torch.uint8) << places).sum(1))

    return run


def packs_but_the_last(call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    return packs(call, [inputs[0].view(-1)[:-8]], [outputs[0][:-1]])


def seeds(_call: Call, _inputs: Tensors, outputs: Tensors) -> Run:
    return lambda: outputs[0].random_()


def seeds_the_same(_call: Call, _inputs: Tensors, outputs: Tensors) -> Run:
    return lambda: outputs[0].fill_(1)


def seeds_nothing(_call: Call, _inputs: Tensors, _outputs: Tensors) -> Run:
    return lambda: None


def refuses(_subgraph: Subgraph, _candidate: Candidate) -> str | None:
    return "it is planted to refuse"


def good_compiled(call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    return good(call, inputs, outputs)


def raises_compiled(_call: Call, _inputs: Tensors, _outputs: Tensors) -> Run:
    raise RuntimeError("the compiler found nothing good")


def exits_compiled(_call: Call, _inputs: Tensors, _outputs: Tensors) -> Run:
    os._exit(9)


def hangs_compiled(call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    time.sleep(600)
    return good(call, inputs, outputs)


def _plant(function: Callable[..., object], compiles: bool = False) -> None:
    name = function.__name__
    KERNELS.add(Kernel(f"planted_{name}", ("planted",), f"planted_kernels:{name}", compiles=compiles))


for _function in (good, roomy, slow, wrong, not_a_number, unwritten, modifies, spills, raises, hangs, segfaults, exits,
                  greedy, exits_once, counted, resizes, slices, draws, draws_too_few, draws_half, draws_the_same, drops,
                  copies_unturned, drops_byte, packs, packs_backwards, packs_but_the_last, seeds, seeds_the_same,
                  seeds_nothing):  # fmt: skip
    _plant(_function)
for _function in (good_compiled, raises_compiled, exits_compiled, hangs_compiled):
    _plant(_function, compiles=True)
KERNELS.add(Kernel("planted_late_compiled", ("planted",), "tests.measure.planted_late:late_compiled", compiles=True))
KERNELS.add(Kernel("planted_refused", ("planted",), "planted_kernels:good", refuses=refuses))
