"""Kernels with one planted fault each, for tests of measuring on a CUDA device. They all claim to compute `add`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.records import Call
from autotuner.kernels.registry import KERNELS, Kernel

Tensors = Sequence[Tensor]
Run = Callable[[], object]

BEYOND = 1 << 38
"""So many elements behind a tensor, a terabyte, nothing is mapped."""
HANG_CYCLES = 1 << 37
"""At 2 GHz, 69 seconds: longer than any timeout here, and over by itself."""
SHARED_BYTES = 1 << 20


class Endless:
    """A tensor's memory as if it went on and on, in the form that torch and CuPy exchange."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (BEYOND,), "typestr": "<f4", "data": (tensor.data_ptr(), False), "version": 2,
        }  # fmt: skip


def reads_beyond(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    wild = torch.as_tensor(Endless(inputs[0]), device=inputs[0].device)

    def run() -> None:
        torch.add(inputs[0], wild[BEYOND - 1], out=outputs[0])

    return run


def reads_beyond_later(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    """Is right when it is verified and goes wrong when it is called once more: an error while something is timed."""
    wild = torch.as_tensor(Endless(inputs[0]), device=inputs[0].device)
    calls = [0]

    def run() -> None:
        torch.add(inputs[0], inputs[1], out=outputs[0])
        calls[0] += 1
        if calls[0] > 2:
            outputs[0].add_(wild[BEYOND - 1])

    return run


def hangs_on_device(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    def run() -> None:
        torch.cuda._sleep(HANG_CYCLES)  # type: ignore[no-untyped-call]
        torch.add(inputs[0], inputs[1], out=outputs[0])

    return run


def shares_too_much(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    """Asks for a mebibyte of shared memory; no multiprocessor has as much."""
    import cupy  # type: ignore[import-not-found, unused-ignore]

    body = "extern __shared__ float held[]; held[0] = x[0]; x[0] = held[0];"
    source = f'extern "C" __global__ void shares(float* x) {{ {body} }}'
    kernel = cupy.RawKernel(source, "shares")

    def run() -> None:
        torch.add(inputs[0], inputs[1], out=outputs[0])
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((1,), (32,), (outputs[0].data_ptr(),), shared_mem=SHARED_BYTES)

    return run


def waits(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    """Waits for the device, which cannot be captured in a graph."""

    def run() -> None:
        torch.add(inputs[0], inputs[1], out=outputs[0])
        outputs[0].sum().item()

    return run


def greedy_on_device(_call: Call, _inputs: Tensors, outputs: Tensors) -> Run:
    return lambda: torch.empty(1 << 50, device=outputs[0].device)


def roomy_on_device(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    return lambda: outputs[0].copy_(inputs[0] + inputs[1])


def repeats(_call: Call, inputs: Tensors, outputs: Tensors) -> Run:
    """Adds ten times."""

    def run() -> None:
        for _ in range(10):
            torch.add(inputs[0], inputs[1], out=outputs[0])

    return run


for _function in (reads_beyond, reads_beyond_later, hangs_on_device, shares_too_much, waits, greedy_on_device,
                  roomy_on_device, repeats):  # fmt: skip
    _name = _function.__name__
    KERNELS.add(Kernel(f"planted_{_name}", ("planted",), f"planted_cuda_kernels:{_name}"))
