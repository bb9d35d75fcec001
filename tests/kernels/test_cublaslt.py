"""What is asked of cuBLASLt: seen by a stand-in for its bindings, since products themselves need a GPU."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from autotuner.errors import KernelError
from autotuner.kernels.on_torch import cublaslt
from autotuner.records import Call
from autotuner.space import build_space, space_file
from tests.kernels.calls import ROOMY, layer, prepare


class FakeLt:
    """Stands in for nvmath's bindings: keeps what it is asked, and computes nothing."""

    cuBLASLtError = RuntimeError
    MatmulDescAttribute = SimpleNamespace(TRANSA="ta", TRANSB="tb", EPILOGUE="epilogue", BIAS_POINTER="bias")
    MatmulPreferenceAttribute = SimpleNamespace(
        MAX_WORKSPACE_BYTES="workspace", **{f"MIN_ALIGNMENT_{name}_BYTES": name for name in "ABCD"}
    )
    matmul_heuristic_result_dtype = SimpleNamespace(itemsize=96)

    def __init__(self, offered: int = 3) -> None:
        self.offered, self.described, self.layouts, self.launched = offered, {}, [], []  # type: ignore[var-annotated]

    def matmul_desc_create(self, *_: int) -> int:
        return 1

    def matmul_desc_set_attribute(self, _: int, name: str, pointer: int, size: int) -> None:
        self.described[name] = int.from_bytes(ctypes.string_at(pointer, size), "little")

    def matrix_layout_create(self, *shape: int) -> int:
        self.layouts.append(shape)
        return 100 + len(self.layouts)

    def matmul_preference_create(self) -> int:
        return 2

    def matmul_preference_set_attribute(self, *_: Any) -> None:
        pass

    matmul_preference_destroy = matmul_desc_destroy = matrix_layout_destroy = matmul_preference_set_attribute

    def MatmulHeuristicResult(self, count: int) -> Any:
        return SimpleNamespace(ptr=10_000, workspace_size=[0, 512, 0][: self.offered] + [0] * count)

    def matmul_algo_get_heuristic(self, *arguments: int) -> None:
        ctypes.c_int32.from_address(arguments[-1]).value = self.offered

    def matmul(self, *arguments: int) -> None:
        self.launched.append(arguments)


@pytest.fixture
def fake_lt(monkeypatch: pytest.MonkeyPatch) -> FakeLt:
    fake = FakeLt()
    monkeypatch.setattr(cublaslt, "_handle", lambda _: (fake, 7))
    monkeypatch.setattr(cublaslt, "current_stream", lambda _: 77)
    return fake


def built(kernel: str, algorithm: int) -> tuple[Call, list[Any], Any]:
    """Return the first call of a layer with this kernel and algorithm, its operands in boundary order, and its run."""
    space = build_space(layer(ROOMY, "float32"), space_file("cuda"))
    params = (("algorithm", algorithm),)
    call = next(c for c in space.calls.values() if (c.candidate.kernel, c.candidate.params) == (kernel, params))
    made = prepare(call)
    return call, [*made.inputs, *made.outputs], made.run


def test_a_weights_gradient_and_its_biass_are_one_call_of_the_library(fake_lt: FakeLt) -> None:
    call, operands, run = built("cublaslt_matmul_bias_grad", 1)
    run()
    ((_, _, _, a, _, b, _, _, c, _, d, _, algorithm, workspace, size, stream),) = fake_lt.launched
    pointers = {tensor.data_ptr() for tensor in operands}
    bias = operands[len(call.subgraph.inputs) + [t.dim() for t in operands[len(call.subgraph.inputs) :]].index(1)]
    assert {a, b, d, fake_lt.described["bias"]} == pointers
    assert fake_lt.described["bias"] == bias.data_ptr()
    assert fake_lt.described["epilogue"] in (256, 512)
    summed = a if fake_lt.described["epilogue"] == 256 else b
    (number,) = (node.inputs[0] for node in call.subgraph.nodes if node.kind == "bias_grad")
    assert summed == operands[call.subgraph.inputs.index(number)].data_ptr()
    assert c == d
    assert algorithm == 10_000 + 96
    assert (size, stream) == (512 + 256, 77)
    assert workspace


@pytest.mark.usefixtures("fake_lt")
def test_an_algorithm_that_the_library_does_not_offer_is_refused_in_a_sentence() -> None:
    with pytest.raises(KernelError, match="cuBLASLt offers 3 algorithms for this product; there is no number 5"):
        built("cublaslt_matmul", 5)
