import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import autotuner.kernels.rules
from autotuner.errors import KernelError
from autotuner.ir.records import Candidate, Node, Subgraph, TensorType
from autotuner.kernels import KERNELS, Kernel, Registry
from autotuner.kernels.registry import declared_layouts, never_refuses
from tests.kernels.library import LIBRARY

ADD = Subgraph((Node("add", "ab,ab->ab", (0, 1), (2,)),), (TensorType((2, 3), "float32"),) * 3, (0, 1), (2,))


def test_a_taken_name_says_what_it_runs() -> None:
    registry = Registry()
    registry.add(Kernel("mine", ("add",), "some.module:add"))
    with pytest.raises(KernelError, match=r"'mine' is registered already, running some\.module:add"):
        registry.add(Kernel("mine", ("bias",), "other.module:bias"))


def test_a_missing_name_lists_what_is_known() -> None:
    registry = Registry()
    registry.add(Kernel("b", (), "m:b"))
    registry.add(Kernel("a", (), "m:a"))
    assert "a" in registry
    assert "c" not in registry
    assert [kernel.name for kernel in registry] == ["b", "a"]
    with pytest.raises(KernelError, match="no kernel 'c'; known: a, b"):
        registry["c"]


def test_without_rules_a_kernel_takes_tensors_as_declared() -> None:
    kernel = Kernel("plain", ("add",), "m:add")
    assert list(kernel.layouts(ADD)) == list(declared_layouts(ADD)) == [("ab", "ab", "ab")]
    assert kernel.refuses(ADD, Candidate("plain", ("ba", "ab", "ab"))) is None
    assert never_refuses(ADD, Candidate("plain", ())) is None


def test_every_registered_kernel_has_an_implementation() -> None:
    names = [kernel.name for kernel in KERNELS]
    assert len(names) > 30
    for kernel in KERNELS:
        assert callable(kernel.builder()), kernel.name
        if kernel.consistent:
            module, _, function = kernel.consistent.partition(":")
            assert callable(getattr(import_module(module), function))


def test_what_compiles_is_named_after_its_compiler() -> None:
    for kernel in KERNELS:
        assert kernel.compiles == (kernel.name.split("_")[0] in ("cupy", "inductor", "triton")), kernel.name


def test_libraries_of_nvidia_and_cuda_cpp_are_for_nvidia_alone() -> None:
    alone = {kernel.name.split("_")[0] for kernel in KERNELS if kernel.refuses_vendor("amd")}
    assert alone == {"cublaslt", "cudnn", "cupy"}
    assert not any(kernel.refuses_vendor("nvidia") for kernel in KERNELS)
    assert (
        KERNELS["cupy_rows"].refuses_vendor("amd")
        == "cupy_rows needs a device of NVIDIA, and this one's vendor is 'amd'"
    )


def test_ptx_is_in_one_function_of_triton_programs() -> None:
    folder = Path(autotuner.kernels.__file__).parent
    assert [file.name for file in folder.rglob("*.py") if "inline_asm" in file.read_text()] == ["bits.py"]
    text = (folder / "triton" / "bits.py").read_text()
    assert text.count("tl.inline_asm") == text[text.index("def dropped_halves") :].count("tl.inline_asm") == 2


def test_what_draws_masks_is_unbiased_and_all_else_exact() -> None:
    for kernel in KERNELS:
        draws = kernel.covers == ("dropout_mask",) or kernel.name in (
            *LIBRARY,
            "triton_attention",
            "triton_wide_attention",
        )
        assert kernel.numerics == ("unbiased" if draws else "exact"), kernel.name


def test_a_search_for_a_kernels_name_finds_where_it_is_registered() -> None:
    folder = Path(autotuner.kernels.rules.__file__).parent
    rules = "".join(file.read_text() for file in folder.glob("*.py"))
    for kernel in KERNELS:
        if kernel.runs.startswith("autotuner."):
            assert f'("{kernel.name}",' in rules, kernel.name


def test_rules_load_without_torch() -> None:
    program = "import sys, autotuner.kernels.rules, autotuner.space; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_every_kernel_that_does_not_say_that_it_reads_flat_masks_refuses_them_in_a_sentence() -> None:
    tensor = TensorType((2, 3), "float32")
    product = Subgraph((Node("dropout", "ab,ab->ab", (0, 1), (2,), (("p", 0.5),)),), (tensor,) * 3, (0, 1), (2,))
    strided = [kernel for kernel in KERNELS if not kernel.flat]
    assert len(strided) > 30
    for kernel in strided:
        for text in ("ab:bit", "ab:seed", "ab:flash"):
            reason = kernel.refuses(product, Candidate(kernel.name, ("ab", text, "ab")))
            assert reason == f"{kernel.name} reads and writes tensors by their strides, and {text} has none"
