"""Kernels in CUDA C++ on a host without a device: the same text, compiled as C++ with threads for threads."""

import ctypes
import re
import subprocess
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from autotuner.kernels.cupy.launch import PRELUDE_TEXT

HOST_TEXT = Path(__file__).with_name("host.cuh").read_text()
FLAGS = ("-std=c++20", "-O0", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-fPIC", "-pthread")
MULTIPROCESSORS = 2
MOST_ARGUMENTS = 20


class HostCompiled:
    """Stands in for `autotuner.kernels.cupy.launch.Compiled`."""

    def __init__(self, text: str, folder: Path) -> None:
        name = folder / sha256(text.encode()).hexdigest()[:16]
        library = name.with_suffix(".so")
        if not library.exists():
            header = _precompiled(folder)
            name.with_suffix(".cpp").write_text(f'#include "{header.name}"\n' + PRELUDE_TEXT + text)
            _compile(name.with_suffix(".cpp"), library, "-shared")
        self._library = ctypes.CDLL(str(library))
        threads = re.search(r"constexpr int THREADS = (\d+)", text)
        self._shared = int(threads[1]) if threads else 0

    def launch(self, name: str, blocks: int, threads: int, operands: Sequence[Tensor]) -> None:
        addresses = [tensor.data_ptr() for tensor in operands]
        arguments = (ctypes.c_void_p * MOST_ARGUMENTS)(*addresses, *[0] * (MOST_ARGUMENTS - len(addresses)))
        kernel = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)
        shared = self._shared if name == "over_rows" else threads
        self._library.run_on_host(kernel, blocks, threads, shared, arguments)


def _precompiled(folder: Path) -> Path:
    """Return the header of what stands in for a device; it and the standard library are parsed once for all kernels."""
    header, done = folder / "host.hpp", folder / "host.hpp.gch"
    if not done.exists():
        header.write_text(HOST_TEXT)
        _compile(header, done, "-x", "c++-header")
    return header


def _compile(source: Path, target: Path, *options: str) -> None:
    command = ["g++", *FLAGS, *options, str(source), "-o", str(target)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def on_host(folder: Path) -> tuple[object, object]:
    """Return what stands in for `compiled` and `multiprocessors`."""
    return (lambda text, _device: HostCompiled(text, folder)), (lambda _device: MULTIPROCESSORS)


def cpu_only(device: torch.device) -> bool:
    return device.type == "cpu"
