"""Programs whose results are written in place: parts of concatenations, and grouped products, verify as all kernels."""

import json
from typing import Any

import pytest
import torch

from autotuner.errors import KernelError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph
from autotuner.ir.records import Call, Candidate
from autotuner.kernels import KERNELS
from autotuner.kernels.inductor.in_place import in_place
from autotuner.kernels.rules.in_place import INNER, NO_TILE, TILES
from autotuner.kernels.torch.grouped import sorted_bytes
from autotuner.space.files import space_file
from tests.kernels.calls import interpreted
from tests.kernels.test_grouped import GROUPED, grouped
from tests.kernels.test_program_kernels import faults
from tests.programs import graph_of, written

GATED = [("chunk.default", ["%0", 2, -1]), ("getitem", ["%1", 0]), ("getitem", ["%1", 1]), ("silu.default", ["%2"]),
         ("mul.Tensor", ["%4", "%3"])]  # fmt: skip
ROWS, WIDE, GROUPS = 200, 64, 4


def gated(width: int = 16) -> Graph:
    """Return SwiGLU of both halves of a tensor, whose gradient concatenates theirs."""
    text = written(GATED, [["bfloat16", [24, 2 * width], True]], ["bfloat16", [24, width]])
    return graph_of("program", "tx->ty", text, {"t": 24, "x": 2 * width, "y": width})


def whole_tiles(dtype: str = "bfloat16") -> Graph:
    """Return a grouped product whose matrices have whole tiles."""
    calls = json.loads(json.dumps(GROUPED).replace(json.dumps(GROUPED[1][1]), json.dumps(["%3", 0, GROUPS - 1])))
    inputs = [[dtype, [ROWS, WIDE], True], [dtype, [GROUPS, 2 * WIDE, WIDE], True], ["float32", [ROWS], False]]
    extents = {"s": ROWS, "h": WIDE, "f": 2 * WIDE, "e": GROUPS}
    return graph_of("program", "sh,efh,s->sf", written(calls, inputs, [dtype, [ROWS, 2 * WIDE]]), extents)


def calls(graph: Graph, tile: str, matrices_tile: str = NO_TILE) -> list[Call]:
    """Return a call of each of a training graph's programs, where a kernel in place takes it."""
    found = []
    for operator in training_graph(graph).operators:
        subgraph = training_graph(graph).subgraph([operator], operator.inputs, operator.outputs)
        kernel = KERNELS[f"inductor_in_place_{operator.kind}"]
        params = (("matrices_tile", matrices_tile if operator.kind == "program_grad" else NO_TILE), ("tile", tile))
        candidate = Candidate(kernel.name, tuple(each.axes for each in subgraph.tensors), params, kernel.version)
        if kernel.refuses(subgraph, candidate) is None:
            found.append(Call(subgraph, candidate))
    return found


def compiles(call: Call, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Build a call, and return how often each function is called in what is compiled."""
    counts: dict[str, int] = {}
    real = torch._inductor.compile_fx.compile_fx_inner

    def counted(module: torch.fx.GraphModule, *rest: Any, **more: Any) -> Any:
        for node in module.graph.nodes:
            counts[str(node.target)] = counts.get(str(node.target), 0) + 1
        return real(module, *rest, **more)

    monkeypatch.setattr("autotuner.kernels.inductor.fused.compile_fx_inner", counted)
    monkeypatch.setattr("autotuner.kernels.inductor.in_place._COMPILED", {})
    operands = [torch.empty(each.extents, dtype=getattr(torch, each.dtype)) for each in call.subgraph.tensors]
    numbers = (call.subgraph.inputs, call.subgraph.outputs)
    in_place(call, *([operands[number] for number in side] for side in numbers))
    return counts


@pytest.mark.slow
def test_gradients_of_halves_are_written_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calls(gated(), NO_TILE)
    assert [call.candidate.kernel for call in found] == [f"inductor_in_place_{k}" for k in ("program", "program_grad")]
    counts = compiles(found[1], monkeypatch)
    assert counts["aten.copy_.default"] == 2
    assert "aten.cat.default" not in counts
    assert faults(found[1:]) == []


def test_what_has_no_parts_is_refused_where_it_is_built() -> None:
    forward, _ = calls(gated(), NO_TILE)
    with pytest.raises(KernelError, match="neither concatenations nor grouped products"):
        compiles(forward, pytest.MonkeyPatch())


def test_halves_that_begin_at_odd_places_are_left_to_others() -> None:
    """The compiler would copy such an operand, and write the copy."""
    _, backward = calls(gated(3), NO_TILE)
    with pytest.raises(KernelError, match="neither"):
        compiles(backward, pytest.MonkeyPatch())


@pytest.mark.slow
@pytest.mark.parametrize("matrices_tile", [NO_TILE, "256x128"])
def test_grouped_products_write_their_outputs(matrices_tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = calls(whole_tiles(), "128x128", matrices_tile)
    into = "autotuner.grouped_product_into.default"
    assert compiles(forward, monkeypatch)[into] == 1
    counts = compiles(backward, monkeypatch)
    assert counts[into] == (2 if matrices_tile in TILES else 1)
    assert counts.get("autotuner.grouped_product.default", 0) == 2 - counts[into]
    assert faults([forward, backward]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*space_file("cuda").kernels["inductor_in_place_program"].params["tile"][1:]])
def test_grouped_products_by_triton_equal_the_reference(tile: str) -> None:
    from tests.kernels.test_attention_triton import verified

    found = [each for other in (NO_TILE, "256x128") for each in calls(whole_tiles(), str(tile), other)]
    assert len(found) == 4
    assert verified(found) == {}


def test_candidates_that_do_not_fit_are_refused() -> None:
    def reason(graph: Graph, tile: str, other: str = NO_TILE) -> str | None:
        (operator,) = graph.operators
        subgraph = graph.subgraph([operator], operator.inputs, operator.outputs)
        params = (("matrices_tile", other), ("tile", tile))
        candidate = Candidate("inductor_in_place_program", tuple(each.axes for each in subgraph.tensors), params)
        return KERNELS["inductor_in_place_program"].refuses(subgraph, candidate)

    assert reason(whole_tiles(), "128x128") is None
    assert reason(whole_tiles(), "32x32") == (
        "a tile is one of none, 64x256, 128x128, 128x256, 256x128; given: '32x32'"
    )
    assert "and its gradient a second one; given: none and none" in str(reason(whole_tiles(), NO_TILE))
    assert "given: 128x128 and 256x128" in str(reason(whole_tiles(), "128x128", "256x128"))
    assert reason(whole_tiles("float32"), "128x128") == "grouped products are tried in bfloat16, and not in float32"
    assert reason(grouped("bfloat16"), "128x128") == (
        f"matrices of groups have multiples of {INNER} elements along both axes, and not 5"
    )
    assert "has no tiles; given: 128x128 and none" in str(reason(gated(), "128x128"))


def test_integers_of_a_byte_are_sorted_as_such() -> None:
    numbers = torch.randint(0, 256, (3, 70))
    for dim, descending in ((-1, False), (0, True)):
        made = sorted_bytes(numbers, stable=True, dim=dim, descending=descending)
        wanted = torch.sort(numbers, stable=True, dim=dim, descending=descending)
        assert made[0].dtype == torch.int64
        assert torch.equal(made[0], wanted.values)
        assert torch.equal(made[1], wanted.indices)


@pytest.mark.slow
def test_programs_equal_a_loop_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    found = interpreted("tests.kernels.interpreted_groups")
    assert len(found) == 10
    assert max(found.values()) < 2e-3, found
