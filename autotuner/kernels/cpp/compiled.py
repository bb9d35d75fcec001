"""Sources in C++ as functions: compiled once for this machine, and kept on disk beside what Inductor compiles."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from autotuner.errors import KernelError

ARCHITECTURE = ("-march=native",)
"""AVX-512 where the processor has it, else AVX2 with FMA; with no such option the sources are portable code."""
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
"""Infinite numbers and those that are none stay what they are: no -ffast-math, which also changes the whole process."""
COMPILE_S = 120
SOURCES = Path(__file__).parent


@cache
def library(name: str) -> ctypes.CDLL:
    """Return a source of this folder, compiled: from disk where this machine, or one like it, has done so before.

    OpenMP is the one that torch has loaded, so that both have the same threads.

    Raises:
        KernelError: there is no compiler, or it has failed.
    """
    text = "".join(path.read_text() for path in sorted((*SOURCES.glob("*.h"), SOURCES / f"{name}.cpp")))
    compiler = _compiler()
    flags = (*FLAGS, *ARCHITECTURE)
    key = sha256("\0".join((text, compiler, _version(compiler), *flags, _processor())).encode()).hexdigest()
    made = Path(_cache_dir(), "autotuner", f"{name}-{key[:32]}.so")
    if not made.exists():
        _compile(compiler, flags, SOURCES / f"{name}.cpp", made)
    try:
        return ctypes.CDLL(str(made))
    except OSError as error:
        raise KernelError(f"what {compiler} made of {name}.cpp cannot be loaded: {error}") from None


def _compiler() -> str:
    """Return Inductor's compiler. Importing Inductor takes seconds: where nobody has, what it takes by default."""
    name = os.environ.get("CXX", "g++")
    if "torch._inductor" not in sys.modules and shutil.which(name):
        return name
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return str(get_cpp_compiler())
    except InvalidCxxCompiler:
        raise KernelError("own CPU kernels need a C++ compiler, and none was found: install g++, or set CXX") from None


def _cache_dir() -> str:
    """Return the folder in which Inductor keeps what it compiles."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given is not None:
        return given
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def _compile(compiler: str, flags: Sequence[str], source: Path, made: Path) -> None:
    """Compile into a file that is there when it is whole, whoever else compiles it at the same time."""
    made.parent.mkdir(parents=True, exist_ok=True)
    handle, being_made = tempfile.mkstemp(suffix=".so", dir=made.parent)
    os.close(handle)
    try:
        done = subprocess.run(
            [compiler, *flags, "-o", being_made, str(source)], capture_output=True, text=True, timeout=COMPILE_S
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            told = next((line for line in lines if "error" in line), f"exit code {done.returncode}")
            raise KernelError(f"{compiler} cannot compile {source.name}: {told}")
        os.chmod(being_made, 0o755)
        os.replace(being_made, made)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"{compiler} cannot compile {source.name}: {error}") from None
    finally:
        Path(being_made).unlink(missing_ok=True)


@cache
def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=COMPILE_S).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"{compiler} does not run: {error}") from None


@cache
def _processor() -> str:
    """Return what -march=native depends on: processors of one model may have different features switched on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    told = {line.split(":")[0].strip(): line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "\n".join((platform.machine(), *told.values()))


def function(source: str, name: str, argument: Any) -> Any:
    """Return a function of a source, which takes a pointer to a structure and the number of threads."""
    found = getattr(library(source), name)
    found.argtypes = [ctypes.POINTER(argument), ctypes.c_int]
    found.restype = None
    return found
