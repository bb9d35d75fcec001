"""A device of another type than torch's "cpu" and "cuda": what is asked by type, and code that names a type.

Torch makes tensors without memory on such a device, so that functions are asked which read no numbers.
"""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import AdamW

import autotuner.runtime
from autotuner.api.backend import _device_type
from autotuner.ir.device import alignment_bytes, has_graphs, recorded_vendor
from autotuner.measure.verification import seed_device
from autotuner.runtime import one_pass_updates, peers
from autotuner.runtime.capture import fragments
from autotuner.runtime.capture.axes import UnknownError
from autotuner.runtime.capture.equal_calls import GROUPED, Called, equal_call
from autotuner.runtime.devices import CudaRuntime, device_runtime
from autotuner.runtime.linear_cross_entropy import empty_words
from autotuner.runtime.one_pass_updates import OnePassUpdates
from autotuner.runtime.peers.beside_kernels import BesideKernels
from autotuner.runtime.peers.on_gpu import PLAN
from tests.runtime.made_up_device import OTHER, MadeUpDevice, a_type_with_graphs
from tests.runtime.plans import configuration, model

RUNTIME = Path(autotuner.runtime.__file__).parent
NAMES = {"is_cuda", "CUDA", "NVIDIA", "AMD", "hip"}
STRINGS = {"cuda", "nvidia", "amd", "rocm", "hip"}


def on_other(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without memory on a device of the other type."""
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device=OTHER)


def test_a_type_that_is_not_listed_is_aligned_to_bytes_and_has_no_graphs() -> None:
    assert (alignment_bytes(OTHER), has_graphs(OTHER), recorded_vendor(OTHER, {})) == (1, False, OTHER)


def test_a_record_and_a_runtime_make_a_type_known(monkeypatch: pytest.MonkeyPatch) -> None:
    a_type_with_graphs(monkeypatch)
    assert (alignment_bytes(OTHER), has_graphs(OTHER)) == (64, True)
    assert isinstance(device_runtime(torch.device(OTHER)), MadeUpDevice)


def test_a_device_says_itself_to_how_many_words_heads_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(MadeUpDevice):
        columns_multiple = 32

    assert empty_words(50, torch.device(OTHER)) == 0
    a_type_with_graphs(monkeypatch, Wide)
    assert empty_words(50, torch.device(OTHER)) == 14


def test_products_are_summed_wide_on_devices_of_nvidia_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaRuntime(torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert (device.sums_wide, device.has_triton) == (True, True)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert (device.sums_wide, device.has_triton) == (False, True)


@pytest.mark.parametrize("has_triton", [False, True])
def test_steps_in_one_pass_are_made_where_there_is_triton(has_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiling(MadeUpDevice):
        pass

    Compiling.has_triton = has_triton
    a_type_with_graphs(monkeypatch, Compiling)
    monkeypatch.setattr(one_pass_updates, "_tables", lambda *_: object())
    updates = OnePassUpdates(AdamW([torch.zeros(1)]), torch.device(OTHER))
    assert updates.is_possible == has_triton


def test_a_grouped_product_whose_sizes_the_host_waits_for_is_left_out_where_calls_are_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, matrices, ends = on_other(6, 4), on_other(2, 4, 3), on_other(2, dtype=torch.int32)
    given: Called = (GROUPED, (rows, matrices, ends), {})
    assert equal_call(*given, on_other(6, 3)) == given
    a_type_with_graphs(monkeypatch)
    with pytest.raises(UnknownError, match="for whose sizes the host waits"):
        equal_call(*given, on_other(6, 3))
    assert equal_call(*given, on_other(6, 3, dtype=torch.bfloat16)) == given


def test_a_traced_call_is_kept_apart_by_autocast_of_any_type() -> None:
    before, enabled, dtype = fragments._state(), torch.is_autocast_enabled(OTHER), torch.get_autocast_dtype(OTHER)
    found = []
    try:
        for each in (torch.bfloat16, torch.float16):
            torch.set_autocast_enabled(OTHER, True)
            torch.set_autocast_dtype(OTHER, each)
            found.append(fragments._state())
    finally:
        torch.set_autocast_enabled(OTHER, enabled)
        torch.set_autocast_dtype(OTHER, dtype)
    assert len({before, *found}) == 3
    assert fragments._state() == before


def test_a_graph_is_of_the_device_that_is_not_the_host() -> None:
    host, nowhere = torch.zeros(1), torch.zeros(1, device="meta")
    assert _device_type([host, on_other(2), 3]) == OTHER
    assert _device_type([host, nowhere, 3]) == "cpu"
    assert _device_type([]) == "cpu"


def test_what_is_verified_draws_from_the_devices_own_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(torch.get_device_module(OTHER), "default_generators", own)
    seed_device(torch.device(OTHER, 1), 7)
    assert [each.initial_seed() == 7 for each in own] == [False, True]


def test_peers_of_a_plan_are_those_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def timed(*given: object) -> object:
        asked.append(given)
        return {PLAN: [1.0]}, {PLAN: None}, BesideKernels(0.0)

    found = configuration(model(), 0)
    plan = replace(found, environment={**found.environment, "device_type": OTHER})
    monkeypatch.setattr(peers, "time_on_gpu", timed)
    a_type_with_graphs(monkeypatch)
    assert peers.time_peers(plan).plan_us == 1.0
    assert len(asked) == 1


def named(tree: ast.AST) -> Iterator[str]:
    """Yield what a module names of a vendor or of its type, as it is written; words in texts are none."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if name in NAMES or name.startswith("_cuda_"):
                yield ast.unparse(node)
            case ast.Attribute(value=ast.Name("torch"), attr="cuda"):
                yield "torch.cuda"
            case ast.Name(name) if name in NAMES:
                yield name
            case ast.alias(name) | ast.ImportFrom(module=str(name)) if name in NAMES or name.startswith("torch.cuda"):
                yield name
            case ast.Constant(str(text)) if text in STRINGS:
                yield repr(text)
            case _:
                pass


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torch.cuda.synchronize()", ["torch.cuda"]),
        ("from torch.cuda import Event", ["torch.cuda"]),
        ("import torch.cuda.graphs", ["torch.cuda.graphs"]),
        ("from autotuner.ir.device import CUDA", ["CUDA"]),
        ("x.is_cuda and device.type == 'cuda'", ["x.is_cuda", "'cuda'"]),
        ("torch._C._cuda_getCurrentRawStream(0)", ["torch._C._cuda_getCurrentRawStream"]),
        ("warn('without CUDA graphs')", []),
    ],
)
def test_names_of_a_type_are_seen_and_words_are_not(text: str, found: list[str]) -> None:
    assert sorted(named(ast.parse(text))) == sorted(found)


def test_only_modules_of_a_device_name_its_type_or_vendor() -> None:
    """What differs between devices is asked of `DeviceRuntime`, or of the record of a type."""
    files = [path for path in RUNTIME.rglob("*.py") if path.parent != RUNTIME / "devices"]
    assert len(files) > 100
    found = {str(path.relative_to(RUNTIME)): [*named(ast.parse(path.read_text()))] for path in files}
    assert {path: names for path, names in found.items() if names} == {}
