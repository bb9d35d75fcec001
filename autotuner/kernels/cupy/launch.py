"""Compilation of CUDA C++ by NVRTC, and launches on torch's current stream, both through CuPy."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotuner.errors import KernelError

DEVICE_TEXT = Path(__file__).with_name("device.cuh").read_text()
PRELUDE_TEXT = Path(__file__).with_name("prelude.cuh").read_text()
OPTIONS = ("-std=c++17",)


@dataclass(frozen=True, slots=True)
class Foreign:
    """A stream by its address, as the CUDA stream protocol wants it."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


class Compiled:
    """A compiled text on one device.

    Args:
        text: CUDA C++ that relies on the prelude.
        device: where it runs.

    Raises:
        KernelError: CuPy is not installed, or the text does not compile.
    """

    def __init__(self, text: str, device: torch.device) -> None:
        try:
            import cupy
        except ImportError as error:
            raise KernelError(
                f"kernels in CUDA C++ are compiled through CuPy, which cannot be imported: {error}"
            ) from None
        self._cupy, self._device = cupy, device
        self._kernels: dict[str, Any] = {}
        with cupy.cuda.Device(device.index or 0):
            self._module = cupy.RawModule(code=DEVICE_TEXT + PRELUDE_TEXT + text, options=OPTIONS)
            try:
                self._module.compile()
            except cupy.cuda.compiler.CompileException as error:
                raise KernelError(f"NVRTC does not compile this kernel: {error}") from None

    def launch(self, name: str, blocks: int, threads: int, operands: Sequence[Tensor]) -> None:
        """Run a kernel whose arguments are the addresses of these tensors, on torch's current stream."""
        if name not in self._kernels:
            self._kernels[name] = self._module.get_function(name)
        stream = self._cupy.cuda.Stream.from_external(Foreign(torch.cuda.current_stream(self._device).cuda_stream))
        addresses = tuple(np.uint64(tensor.data_ptr()) for tensor in operands)
        with self._cupy.cuda.Device(self._device.index or 0), stream:
            self._kernels[name]((blocks,), (threads,), addresses)


@cache
def compiled(text: str, device: torch.device) -> Compiled:
    """Return a compiled text; each is compiled once in a process, and kept on disk by CuPy for others."""
    return Compiled(text, device)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
