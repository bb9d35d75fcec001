"""The generic fused kernel: its rules over every set of the layer; compiled on four, since each takes seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.rules.fused import FUSIBLE, fused_layouts, global_letters
from tests.kernels.calls import ODD, VARIANTS, copied, faults, layer, subgraphs

T = TensorType((3, 4), "float32")


def sets() -> dict[tuple[str, ...], Subgraph]:
    return {
        subgraph.kinds: subgraph
        for variant in VARIANTS
        for kernel, subgraph in subgraphs(layer(ODD, "float32", **variant))  # type: ignore[arg-type]
        if kernel == "inductor"
    }


@pytest.mark.parametrize(
    "kinds, row",
    [
        (("dropout", "add", "layer_norm"), ("abc", "abc:byte", "abc", "a", "a", "abc", "abc", "ab", "ab")),
        (("dropout", "gelu_erf_grad"), ("abc", "abc", "abc", "abc")),
        (("scale", "softmax", "dropout"), ("acbd", "acbd:byte", "acbd", "acbd")),
        (("scale", "causal_mask", "softmax"), ("abcd", "abcd")),
    ],
    ids=["forward with a byte mask", "backward", "in another order than declared", "with a causal mask inside"],
)
@pytest.mark.slow
def test_a_compiled_set_equals_the_reference_and_clones_nothing(kinds: tuple[str, ...], row: tuple[str, ...]) -> None:
    call = Call(sets()[kinds], Candidate("inductor", row))
    assert row in set(fused_layouts(call.subgraph))
    assert faults([call]) == {}
    assert copied([call])[0][1].clones == 0


def test_every_row_of_every_set_places_its_operands() -> None:
    found = sets()
    assert len(found) > 15
    for kinds, subgraph in found.items():
        rows = list(fused_layouts(subgraph))
        assert len(rows) == len(set(rows))
        assert tuple(subgraph.tensors[number].axes for number in subgraph.boundary) in rows, kinds
        for row in rows:
            candidate = Candidate("inductor", row)
            assert KERNELS["inductor"].refuses(subgraph, candidate) is None
            for number, form in zip(subgraph.boundary, candidate.parsed_forms(), strict=True):
                form.stored("float32", subgraph.tensors[number].axes, subgraph.tensors[number].extents)


def test_masks_double_the_rows_and_parameters_keep_their_order() -> None:
    subgraph = sets()["bias", "gelu_erf", "dropout"]
    rows = list(fused_layouts(subgraph))
    assert len(rows) == 6 * 2
    assert {row[1] for row in rows} == {"a"}
    assert {row[2].endswith(":byte") for row in rows} == {False, True}


def test_letters_are_shared_where_tensors_meet() -> None:
    nodes = (Node("bias", "ab,b->ab", (0, 1), (3,)), Node("add", "ab,ab->ab", (2, 3), (4,)))
    letters = global_letters(Subgraph(nodes, (T, TensorType((4,), "float32"), T, T, T), (0, 1, 2), (4,)))
    assert letters[0] == letters[2] == letters[3] == letters[4]
    assert letters[1] == letters[0][1]


def test_what_is_not_fused_is_refused_with_what_is() -> None:
    product = Subgraph((Node("contraction", "ab,bc->ac", (0, 1), (2,)),), (T, T, T), (0, 1), (2,))
    reason = KERNELS["inductor"].refuses(product, Candidate("inductor", ("ab", "ab", "ab")))
    assert reason == f"contraction is not fused: {', '.join(sorted(FUSIBLE))} are"


def test_slices_of_stacks_are_taken() -> None:
    add = Subgraph((Node("add", "ab,ab->ab", (0, 1), (2,)),), (T, T, T), (0, 1), (2,))
    assert KERNELS["inductor"].refuses(add, Candidate("inductor", ("ab", "a*b@0/2", "ab"))) is None


COMPILED_ONCE = """
import torch
from torch._dynamo.utils import counters
from autotuner.kernels.inductor.fused import compiled_for

def body(x, y):
    y.copy_(x * 3)
    return ()

x, y = torch.ones(4, 8), torch.empty(4, 8)
compiled_for("three times", body, (x, y))([x, y])
assert y.eq(3).all()
found = counters["inductor"]
print(found["fxgraph_cache_miss"], found["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_another_process_loads_what_was_compiled_and_generates_no_code_again(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run = [
        subprocess.run(
            [sys.executable, "-c", COMPILED_ONCE], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert run == [["1", "0"], ["0", "1"]]
