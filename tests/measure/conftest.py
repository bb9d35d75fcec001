"""Subgraphs and planted kernels for tests of measuring."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels.registry import KERNELS
from autotuner.measure.child import load_modules

PLANTED = str(Path(__file__).with_name("planted_kernels.py"))

MakeCall = Callable[..., Call]


@pytest.fixture(scope="module")
def planted() -> Iterator[str]:
    """The planted kernels' file; they are registered for one test module and gone after it."""
    known = {kernel.name for kernel in KERNELS}
    load_modules([PLANTED])
    yield PLANTED
    for name in {kernel.name for kernel in KERNELS} - known:
        del KERNELS._kernels[name]
    del sys.modules["planted_kernels"]


@pytest.fixture(scope="session")
def add() -> MakeCall:
    """A planted kernel on the sum of two 8 x 16 tensors."""
    tensor = TensorType((8, 16), "float32")
    subgraph = Subgraph((Node("add", "ab,ab->ab", (0, 1), (2,)),), (tensor,) * 3, (0, 1), (2,))

    def call(kernel: str, forms: tuple[str, ...] = ("ab", "ab", "ab"), **params: str) -> Call:
        return Call(subgraph, Candidate(f"planted_{kernel}", forms, tuple(params.items())))

    return call
