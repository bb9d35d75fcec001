"""Fused sets by rows and masks of bits: their rules, and the kernels' own text compiled and run on the host."""

from math import inf, isnan, nan
from pathlib import Path

import pytest
import torch

from autotuner.ir.autodiff import training_graph
from autotuner.ir.form import Form
from autotuner.ir.graph import Graph
from autotuner.ir.kinds import KINDS
from autotuner.ir.models import load_model
from autotuner.ir.records import Attributes, Call, Candidate, Node, Scalar, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.cupy import rows as cupy_rows
from autotuner.kernels.cupy.rows import rows
from autotuner.kernels.patterns import Connected
from autotuner.kernels.reference import evaluate
from autotuner.kernels.rules.rows import FUSED, as_rows, rows_layouts
from autotuner.kernels.torch.formats import decoded
from autotuner.space import build_space, space_file
from autotuner.space.fusion import covers
from tests.kernels.calls import ODD, faults, layer, repeated_norm
from tests.kernels.host_cuda import on_host
from tests.mixed import mixed

EXTENTS = {"b": 2, "l": 5, "h": 48, "n": 3, "p": 16, "f": 80}
SETS = (
    ("bias", "dropout", "add", "layer_norm"),
    ("bias", "gelu_erf", "dropout"),
    ("gelu_erf", "dropout"),
    ("dropout", "gelu_erf_grad", "bias_grad"),
    ("add", "layer_norm_grad_parameters", "layer_norm_grad_input", "dropout", "bias_grad"),
)


def params(**launch: int) -> Attributes:
    return tuple(({"threads": 32, "rows": 2, "vector": 8, "blocks": 1, "unroll": 1} | launch).items())


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "host_cuda"
    folder.mkdir(exist_ok=True)
    compiled, multiprocessors = on_host(folder)
    for module in ("rows", "bits"):
        monkeypatch.setattr(f"autotuner.kernels.cupy.{module}.compiled", compiled)
    monkeypatch.setattr("autotuner.kernels.cupy.rows.multiprocessors", multiprocessors)


def sets(extents: dict[str, int], dtype: str, **options: str | float) -> dict[tuple[str, ...], Subgraph]:
    """Return what the kernels by rows cover in a layer beside attention, by kinds."""
    return sets_of(layer(extents, dtype, **options))  # type: ignore[arg-type]


def sets_of(graph: Graph) -> dict[tuple[str, ...], Subgraph]:
    """Return the same of any graph."""
    named = {operator.name: operator for operator in graph.operators}
    found = {}
    file = space_file("cuda")
    for cover in covers(graph, tuple(file.kernels), file.max_operators):
        if "cupy_rows" in cover.kernels:
            members = [named[name] for name in cover.recomputed + cover.operators]
            subgraph = graph.subgraph(members, cover.inputs, cover.outputs)
            if max(len(t.extents) for t in subgraph.tensors) < 4:
                found[subgraph.kinds] = subgraph
    return found


def declared(subgraph: Subgraph, **launch: int) -> Call:
    """Return a call with every tensor as declared and masks as bits."""
    return Call(subgraph, Candidate("cupy_rows", next(iter(rows_layouts(subgraph))), params(**launch)))


@pytest.mark.slow
def test_every_set_of_a_layer_equals_the_reference() -> None:
    found = [declared(subgraph) for subgraph in sets(EXTENTS, "bfloat16").values()]
    assert set(SETS) <= {call.subgraph.kinds for call in found}
    found = [call for call in found if KERNELS["cupy_rows"].refuses(call.subgraph, call.candidate) is None]
    assert len(found) > 12
    assert faults(found) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, launch",
    [
        ("float16", {"threads": 64, "vector": 1, "blocks": 2, "unroll": 2}),
        ("float32", {"rows": 4, "vector": 4, "unroll": 4}),
    ],
    ids=["elements of float16, two warps a row", "float32, more rows at once than there are"],
)
def test_sets_equal_the_reference_however_they_are_launched(dtype: str, launch: dict[str, int]) -> None:
    found = sets(EXTENTS, dtype)
    assert faults([declared(found[kinds], **launch) for kinds in SETS]) == {}


LLAMA = {"b": 2, "l": 5, "h": 48, "g": 1, "r": 3, "p": 16, "f": 128}
GATED = (
    ("add", "rms_norm"),
    ("silu", "multiply"),
    ("multiply", "multiply", "silu_grad"),
    ("add", "rms_norm_grad_parameters", "rms_norm_grad_input", "add"),
)


@pytest.mark.slow
def test_every_set_of_a_gated_layer_equals_the_reference() -> None:
    found = sets(LLAMA, "bfloat16", model="llama-block")
    assert set(GATED) <= set(found)
    wanted = [declared(subgraph) for subgraph in found.values()]
    wanted = [call for call in wanted if KERNELS["cupy_rows"].refuses(call.subgraph, call.candidate) is None]
    assert {call.subgraph.kinds for call in wanted} >= set(GATED)
    assert faults(wanted) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, extents, launch",
    [
        ("float32", LLAMA, {"threads": 64, "vector": 1, "blocks": 2, "unroll": 2}),
        ("float16", LLAMA | {"h": 51, "f": 77}, {"vector": 1, "rows": 4}),
    ],
    ids=["elements of float32, two warps a row", "extents that nothing divides"],
)
def test_sets_of_a_gated_layer_equal_the_reference_however_they_are_launched(
    dtype: str, extents: dict[str, int], launch: dict[str, int]
) -> None:
    found = sets(extents, dtype, model="llama-block")
    assert faults([declared(found[kinds], **launch) for kinds in GATED]) == {}


CASTS = """
version: 1
name: casts
dtype: bfloat16
axes: {b: batch, h: hidden}
presets: {small: {b: 40, h: 64}}
inputs: {x: {axes: bh}, residual: {axes: bh, dtype: float32}}
parameters: {bias: {axes: h, dtype: float32}, scale: {axes: h, dtype: float32}, shift: {axes: h, dtype: float32}}
operators:
  - {name: narrow_bias, kind: cast, spec: "h->h", inputs: [bias], outputs: [narrow_bias], attributes: {dtype: bfloat16}}
  - {name: biased, kind: bias, spec: "bh,h->bh", inputs: [x, narrow_bias], outputs: [biased]}
  - {name: mask, kind: dropout_mask, spec: "->bh", inputs: [], outputs: [mask], attributes: {p: 0.25}}
  - {name: dropped, kind: dropout, spec: "bh,bh->bh", inputs: [biased, mask], outputs: [dropped], attributes: {p: 0.25}}
  - {name: wide, kind: cast, spec: "bh->bh", inputs: [dropped], outputs: [wide], attributes: {dtype: float32}}
  - {name: summed, kind: add, spec: "bh,bh->bh", inputs: [wide, residual], outputs: [summed]}
  - name: norm
    kind: layer_norm
    spec: "bh,h,h->bh,b,b"
    inputs: [summed, scale, shift]
    outputs: [norm, mean, deviation]
    attributes: {epsilon: 1.0e-5}
  - {name: y, kind: cast, spec: "bh->bh", inputs: [norm], outputs: [y], attributes: {dtype: bfloat16}}
outputs: [y]
"""


@pytest.mark.slow
@pytest.mark.parametrize("vector", [1, 8])
def test_sets_with_casts_read_and_write_several_types(vector: int, tmp_path: Path) -> None:
    (tmp_path / "casts.yaml").write_text(CASTS)
    found = sets_of(training_graph(load_model(str(tmp_path / "casts.yaml")).instantiate("small").graph()))
    forward = found["cast", "bias", "dropout", "cast", "add", "layer_norm", "cast"]
    assert {forward.tensors[number].dtype for number in forward.outputs} == {"bfloat16", "float32"}
    (backward,) = (s for kinds, s in found.items() if {"bias_grad", "layer_norm_grad_parameters"} <= set(kinds))
    assert [backward.tensors[number].dtype for number in backward.outputs].count("float32") >= 3
    assert faults([declared(subgraph, vector=vector) for subgraph in found.values()]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("vector", [1, 8])
def test_sets_of_a_norm_that_keeps_what_it_normalised_in_16_bits_equal_the_reference(vector: int) -> None:
    found = sets_of(training_graph(mixed().graph()))
    forward = found["dropout", "cast", "add", "layer_norm", "normalised"]
    assert [forward.tensors[number].dtype for number in forward.outputs].count("bfloat16") == 1
    backward = found["normalised_grad_parameters", "normalised_grad_input", "cast", "dropout"]
    assert {backward.tensors[number].dtype for number in backward.inputs} == {"bfloat16", "float32"}
    of_norms = [subgraph for kinds, subgraph in found.items() if any(kind.startswith("normalised") for kind in kinds)]
    assert faults([declared(subgraph, vector=vector) for subgraph in of_norms]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["gelu_tanh", "relu"])
def test_every_activation_equals_the_reference(activation: str) -> None:
    found = sets(EXTENTS, "bfloat16", activation=activation)
    wanted = [declared(found[activation, "dropout"]), declared(found["dropout", f"{activation}_grad", "bias_grad"])]
    assert faults(wanted) == {}


@pytest.mark.slow
@pytest.mark.parametrize("extents", [ODD, EXTENTS | {"h": 51, "f": 77}], ids=["few", "more than a warp takes"])
def test_extents_that_nothing_divides_are_computed_by_single_elements(extents: dict[str, int]) -> None:
    found = sets(extents, "bfloat16")
    for kinds in SETS:
        call = declared(found[kinds], vector=1)
        assert faults([call]) == {}
        wide = Candidate("cupy_rows", call.candidate.forms, params(vector=4))
        reason = KERNELS["cupy_rows"].refuses(call.subgraph, wide)
        assert reason is not None
        assert "do not begin at multiples of 4" in reason


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["byte", "raw"])
def test_masks_of_bytes_and_raw_ones_are_read_too(storage: str) -> None:
    call = declared(sets(EXTENTS, "bfloat16")["dropout", "gelu_erf_grad", "bias_grad"])
    forms = tuple(form.replace(":bit", f":{storage}") for form in call.candidate.forms)
    assert faults([Call(call.subgraph, Candidate("cupy_rows", forms, params()))]) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch", [{}, {"vector": 4, "unroll": 2}, {"vector": 1, "threads": 64}], ids=["bytes", "halves", "single bits"]
)
def test_relus_result_is_written_and_read_as_signs(launch: dict[str, int]) -> None:
    # Rows of 80 and 160 columns: some threads have none of them.
    for extents in (EXTENTS, EXTENTS | {"f": 160}):
        found = sets(extents, "bfloat16", activation="relu")
        for kinds in (("bias", "relu", "dropout"), ("dropout", "relu_grad", "bias_grad")):
            rows = [row for row in rows_layouts(found[kinds]) if "abc:sign" in row]
            assert faults([Call(found[kinds], Candidate("cupy_rows", rows[0], params(**launch)))]) == {}


def test_signs_are_written_where_rows_have_whole_bytes_only() -> None:
    subgraph = sets(EXTENTS | {"f": 77}, "bfloat16", activation="relu")["bias", "relu", "dropout"]
    row = next(row for row in rows_layouts(subgraph) if "abc:sign" in row)
    reason = KERNELS["cupy_rows"].refuses(subgraph, Candidate("cupy_rows", row, params(vector=1)))
    assert reason == "it writes bits of rows of whole bytes; these have 77 columns"


@pytest.mark.slow
def test_gradients_of_stacked_biases_are_read_out_of_the_stack() -> None:
    space = build_space(layer(EXTENTS, "bfloat16"), space_file("cuda"))
    found = [c for c in space.calls.values() if c.candidate.kernel == "cupy_stacked_bias_grad"]
    assert {len(call.subgraph.nodes) for call in found} == {2, 3}
    assert faults([next(c for c in found if len(c.subgraph.nodes) == count) for count in (2, 3)]) == {}


SIBLINGS = """
version: 1
name: siblings
dtype: bfloat16
axes: {b: batch, l: position, h: hidden, n: head, p: feature}
presets: {small: {b: 2, l: 5, h: 48, n: 3, p: 16}}
inputs: {x: {axes: blh}}
parameters: {first: nph, second: nph, bias: {axes: np, dtype: float32}, shift: {axes: np, dtype: float32}}
operators:
  - {name: narrow, kind: cast, spec: "np->np", inputs: [bias], outputs: [narrow], attributes: {dtype: bfloat16}}
  - {name: other, kind: cast, spec: "np->np", inputs: [shift], outputs: [other], attributes: {dtype: bfloat16}}
  - {name: one, kind: contraction, spec: "blh,nph->blnp", inputs: [x, first], outputs: [one]}
  - {name: two, kind: contraction, spec: "blh,nph->blnp", inputs: [x, second], outputs: [two]}
  - {name: moved, kind: bias, spec: "blnp,np->blnp", inputs: [one, narrow], outputs: [moved]}
  - {name: shifted, kind: bias, spec: "blnp,np->blnp", inputs: [two, other], outputs: [shifted]}
  - {name: act, kind: silu, spec: "blnp->blnp", inputs: [moved], outputs: [act]}
  - {name: y, kind: multiply, spec: "blnp,blnp->blnp", inputs: [act, shifted], outputs: [y]}
outputs: [y]
"""


@pytest.mark.slow
def test_gradients_of_stacked_biases_are_cast_to_their_parameters_type(tmp_path: Path) -> None:
    (tmp_path / "siblings.yaml").write_text(SIBLINGS)
    graph = training_graph(load_model(str(tmp_path / "siblings.yaml")).instantiate("small").graph())
    found = {
        call.subgraph.kinds: call
        for call in build_space(graph, space_file("cuda")).calls.values()
        if call.candidate.kernel == "cupy_stacked_bias_grad"
    }
    assert set(found) == {("bias_grad",) * 2, ("bias_grad", "bias_grad", "cast", "cast")}
    call = found["bias_grad", "bias_grad", "cast", "cast"]
    assert {call.subgraph.tensors[number].dtype for number in call.subgraph.outputs} == {"float32"}
    assert faults([call]) == {}


def alone(kind: str, values: list[float], *, operands: int = 1, dtype: str = "float32") -> tuple[list[float], ...]:
    """Return what the kernel and the reference make of the same values for every operand."""
    tensor = TensorType((1, len(values)), dtype)
    sides = ",".join(["ab"] * operands)
    numbers = tuple(range(operands + 1))
    subgraph = Subgraph((Node(kind, f"{sides}->ab", numbers[:-1], numbers[-1:]),), (tensor,) * (operands + 1),
                        numbers[:-1], numbers[-1:])  # fmt: skip
    call = Call(subgraph, Candidate("cupy_rows", ("ab",) * (operands + 1), params(rows=1, vector=1)))
    x = [torch.tensor([values], dtype=getattr(torch, dtype))] * operands
    out = torch.empty_like(x[0])
    rows(call, x, [out])()
    (wanted,) = evaluate(subgraph, [each.double() for each in x])
    assert wanted is not None
    return out[0].tolist(), wanted[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind, operands", [("gelu_erf", 1), ("gelu_tanh", 1), ("relu", 1), ("silu", 1),
                                            ("multiply", 2), ("gelu_erf_grad", 2), ("gelu_tanh_grad", 2),
                                            ("relu_grad", 2), ("silu_grad", 2)])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_not_finite_large_or_tiny_is_as_in_the_reference(kind: str, operands: int, dtype: str) -> None:
    values = [nan, inf, -inf, 0.0, -0.0, 1e-7, -1e-7, 3.0, -3.0, -5.5, 60.0, -60.0, 6e4, -6e4]
    found, wanted = alone(kind, values, operands=operands, dtype=dtype)
    for value, one, other in zip(values, found, wanted, strict=True):
        if isnan(other):
            assert isnan(one), value
        elif dtype == "float16" and abs(other) > 65504:
            assert abs(one) == inf, value
        else:
            assert one == pytest.approx(other, rel=2e-3 if dtype == "float16" else 3e-6, abs=1e-7), value


def masks(*shares: float, count: int = 100_001) -> tuple[Call, list[torch.Tensor]]:
    """Draw masks of bits with these shares dropped, in one launch."""
    tensor = TensorType((count,), "float32")
    nodes = tuple(Node("dropout_mask", "->a", (), (i,), (("p", p),)) for i, p in enumerate(shares))
    subgraph = Subgraph(nodes, (tensor,) * len(shares), (), tuple(range(len(shares))))
    call = Call(subgraph, Candidate("cupy_mask_bits", ("a:bit",) * len(shares)))
    assert KERNELS["cupy_mask_bits"].refuses(subgraph, call.candidate) is None
    outputs = [torch.empty(-(-count // 8), dtype=torch.uint8) for _ in shares]
    KERNELS["cupy_mask_bits"].builder()(call, [], outputs)()
    return call, [decoded(output, Form.parse("a:bit"), tensor, p) for output, p in zip(outputs, shares, strict=True)]


@pytest.mark.slow
def test_masks_drawn_together_keep_their_shares_and_are_drawn_apart() -> None:
    call, found = masks(0.0, 0.1, 0.5, 0.5, 1.0, 2.0**-16)
    for mask, node in zip(found, call.subgraph.nodes, strict=True):
        p = float(dict(node.attributes)["p"])
        assert float((~mask).double().mean()) == pytest.approx(p, abs=6 * (p * (1 - p) / len(mask)) ** 0.5)
    assert float((found[2] == found[3]).double().mean()) == pytest.approx(0.5, abs=0.01)
    one, next_one = found[1][:-1], found[1][1:]
    assert float((one & next_one).double().mean()) == pytest.approx(0.81, abs=0.01)
    assert faults([masks(0.1, 0.5, 0.25)[0]]) == {}


@pytest.mark.slow
def test_a_graph_with_several_masks_draws_them_together_but_for_attention() -> None:
    space = build_space(layer(EXTENTS, "bfloat16"), space_file("cuda"))
    found = [choice.cover.operators for choice in space.choices if choice.candidate.kernel == "cupy_mask_bits"]
    together = [names for names in found if len(names) > 1]
    assert together == [("output_dropout_mask", "activation_dropout_mask", "feed_forward_dropout_mask")]


def test_rows_and_columns_are_found_from_the_memory_order() -> None:
    subgraph = sets(EXTENTS, "bfloat16")["dropout", "gelu_erf_grad", "bias_grad"]
    table = as_rows(subgraph, declared(subgraph).candidate)
    assert not isinstance(table, str)
    assert (table.rows, table.columns) == (10, 80)
    assert [operand.place for operand in table.operands.values()] == ["full", "full", "full", "full", "column"]
    turned = tuple("cab:bit" if ":bit" in form else "cab" if len(form) == 3 else form
                   for form in declared(subgraph).candidate.forms)  # fmt: skip
    assert as_rows(subgraph, Candidate("cupy_rows", turned)) == "its columns are not contiguous"


@pytest.mark.parametrize(
    "launch, reason",
    [
        ({"threads": 48}, "a power of two; not 48"),
        ({"threads": 512, "rows": 4}, "512 x 4 are 2048"),
        ({"threads": 32, "rows": 1}, "32 x 1 are 32"),
        ({"threads": 64, "rows": 2}, "half of 64 threads would have nothing of a row of 80 elements"),
        ({"rows": 16}, "there are 10 rows"),
        ({"unroll": 16}, "a thread holds at most 64 elements"),
        ({"unroll": 0}, "rows, blocks and unroll are 1 or more; given: 8, 2, 1 and 0"),
        ({"vector": 16}, "vector is one of 1, 2, 4, 8"),
        ({"vector": 0}, "vector is one of 1, 2, 4, 8"),
    ],
)
def test_launch_parameters_that_do_not_fit_are_refused_in_a_sentence(launch: dict[str, int], reason: str) -> None:
    subgraph = sets(EXTENTS, "bfloat16")["dropout", "gelu_erf_grad", "bias_grad"]
    found = KERNELS["cupy_rows"].refuses(subgraph, declared(subgraph, **launch).candidate)
    assert found is not None
    assert reason in found


@pytest.mark.slow
@pytest.mark.parametrize("shift, vector", [(1, 1), (2, 2), (4, 4), (8, 8)])
def test_vectors_are_as_short_as_addresses_ask_for(shift: int, vector: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = declared(sets(EXTENTS, "bfloat16")["gelu_erf", "dropout"])
    texts: list[str] = []
    compiled = vars(cupy_rows)["compiled"]

    def noting(text: str, device: torch.device) -> object:
        texts.append(text)
        return compiled(text, device)

    monkeypatch.setattr(cupy_rows, "compiled", noting)
    x = torch.randn(10 * 80 + shift).bfloat16()[shift:].view(2, 5, 80)
    bits, out = torch.full((100,), 255, dtype=torch.uint8), torch.empty(2, 5, 80, dtype=torch.bfloat16)
    rows(call, [x, bits], [out])()
    assert f"constexpr int VECTOR = {vector};" in texts[0]
    torch.testing.assert_close(out.float(), torch.nn.functional.gelu(x.float()) / 0.75, rtol=1e-2, atol=1e-3)


TIED = """
version: 1
name: tied
dtype: float32
axes: {b: batch, h: hidden}
presets: {small: {b: 64, h: 64}}
inputs: {x: {axes: bh}}
parameters: {bias: h}
operators:
  - {name: one, kind: bias, spec: "bh,h->bh", inputs: [x, bias], outputs: [one]}
  - {name: act, kind: gelu_erf, spec: "bh->bh", inputs: [one], outputs: [act]}
  - {name: two, kind: bias, spec: "bh,h->bh", inputs: [act, bias], outputs: [two]}
  - {name: y, kind: relu, spec: "bh->bh", inputs: [two], outputs: [y]}
outputs: [y]
"""


def test_a_sum_of_gradients_of_a_parameter_that_is_used_twice_is_left_to_others(tmp_path: Path) -> None:
    (tmp_path / "tied.yaml").write_text(TIED)
    graph = training_graph(load_model(str(tmp_path / "tied.yaml")).instantiate("small").graph())
    found = [c for c in build_space(graph, space_file("cuda")).choices if c.candidate.kernel == "cupy_rows"]
    assert any("bias_grad" in choice.call.subgraph.kinds for choice in found)
    for choice in found:
        sums = {n for node in choice.call.subgraph.nodes if node.kind == "bias_grad" for n in node.outputs}
        assert all(sums.isdisjoint(node.inputs) for node in choice.call.subgraph.nodes)


def test_no_set_with_a_kind_that_is_not_fused_by_rows_is_claimed() -> None:
    foreign = {name for name, kind in KINDS.items() if kind.fusible} - FUSED
    assert {"mask", "row_mask", "causal_mask", "softmax", "softmax_grad", "rotary", "rotary_grad"} <= foreign
    (pattern,) = KERNELS["cupy_rows"].patterns
    assert isinstance(pattern, Connected)
    assert foreign.isdisjoint(pattern.kinds)
    x, angle = TensorType((8, 64), "float32"), TensorType((64,), "float32")
    nodes = (Node("rotary", "ab,b,b->ab", (0, 1, 2), (5,), (("axis", "b"),)), Node("add", "ab,ab->ab", (5, 3), (4,)))
    turned = Subgraph(nodes, (x, angle, angle, x, x, x), (0, 1, 2, 3), (4,))
    reason = KERNELS["cupy_rows"].refuses(turned, Candidate("cupy_rows", ("ab", "a", "a", "ab", "ab"), params()))
    assert reason == f"rotary is not fused by rows: {', '.join(sorted(FUSED))} are"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("layer_norm", "abc,c->abc,ab,ab"),
        ("layer_norm", "abc->abc,ab,ab"),
        ("layer_norm_grad_input", "abc,abc,ab,ab->abc"),
        ("layer_norm_grad_parameters", "abc,abc,ab,ab->c"),
        ("rms_norm", "abc->abc,ab"),
        ("rms_norm_grad_input", "abc,abc,ab->abc"),
        ("normalised", "abc,ab,ab->abc"),
        ("normalised", "abc,ab->abc"),
        ("normalised_grad_input", "abc,abc,c,ab->abc"),
        ("normalised_grad_input", "abc,abc,ab->abc"),
        ("normalised_grad_parameters", "abc,abc->c,c"),
        ("normalised_grad_parameters", "abc,abc->c"),
    ],
)
@pytest.mark.parametrize("centred", [False, True])
def test_norms_with_and_without_a_bias_or_a_scale_equal_the_reference(kind: str, spec: str, centred: bool) -> None:
    left, right = (side.split(",") for side in spec.split("->"))
    extents = {"a": 2, "b": 5, "c": 48}
    types = [TensorType(tuple(extents[axis] for axis in axes), "float32") for axes in left + right]
    inputs, outputs = tuple(range(len(left))), tuple(range(len(left), len(types)))
    values: dict[str, Scalar] = {"epsilon": 0.5, "centred": centred, "dtype": "float32"}
    node = Node(kind, spec, inputs, outputs, tuple((name, values[name]) for name in KINDS[kind].attributes))
    one = Subgraph((node,), tuple(types), inputs, outputs)
    call = declared(one, vector=4)
    assert KERNELS["cupy_rows"].refuses(one, call.candidate) is None
    assert faults([call]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("threads, rows", [(64, 4), (128, 2)])
def test_rows_of_a_block_that_are_at_sums_of_different_numbers_leave_each_other_s_alone(
    threads: int, rows: int
) -> None:
    subgraph = repeated_norm(4, 30, 2 * threads)
    call = declared(subgraph, threads=threads, rows=rows, vector=2)
    assert KERNELS["cupy_rows"].refuses(subgraph, call.candidate) is None
    assert faults([call] * 3) == {}


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_norm_s_statistics_have_their_axes_in_any_order(order: str) -> None:
    subgraph = repeated_norm(3, 3, 64, order)  # extents that would not tell
    x, scale, shift, grad = (torch.randn(subgraph.tensors[n].extents, dtype=torch.float64) for n in subgraph.inputs)
    leaves = [tensor.requires_grad_() for tensor in (x, scale, shift)]
    y = torch.nn.functional.layer_norm(x, (64,), scale, shift, 1e-5)
    wanted = torch.autograd.grad(y, leaves, grad)
    scaled, shifted, moved, normal = evaluate(subgraph, [x, scale, shift, grad])
    for found, expected in ((moved, wanted[0]), (scaled, wanted[1]), (shifted, wanted[2]), (normal, y)):
        torch.testing.assert_close(found, expected)
