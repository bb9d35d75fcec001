"""A space: files that cannot be used, forms that tensors may have, and choices that no whole could contain."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotuner.errors import SpaceError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.form import Form
from autotuner.ir.graph import Graph
from autotuner.ir.models import load_model, search_spaces_dir
from autotuner.ir.records import Call, Candidate, Scalar, Subgraph
from autotuner.kernels import KERNELS, Kernel
from autotuner.space import (
    KernelEntry,
    Space,
    SpaceFile,
    build_space,
    convertible,
    describe,
    given_forms,
    load_space,
    plain,
    space_file,
    without_params,
)
from autotuner.space.conversions import changing_formats
from tests.made_up import LINEAR

ODD = {"b": 3, "l": 5, "h": 6, "n": 2, "p": 3, "f": 7}
SITES = ("attention_dropout", "output_dropout", "activation_dropout", "feed_forward_dropout")
CPU = search_spaces_dir() / "kernels" / "cpu.yaml"


def layer(dtype: str = "float32", p: float = 0.1, **options: str) -> Graph:
    chosen = dict.fromkeys(SITES, p) | options
    return training_graph(load_model("bert-encoder").instantiate(None, ODD, chosen, dtype).graph())


def linear(tmp_path: Path, *, train: bool = False) -> Graph:
    path = tmp_path / "linear.yaml"
    path.write_text(LINEAR)
    graph = load_model(str(path)).instantiate(extents={"b": 2, "h": 3, "f": 4}).graph()
    return training_graph(graph) if train else graph


def file(*kernels: str, layouts: Any = "all", conversions: tuple[str, ...] = ("torch_copy",)) -> SpaceFile:
    entries = {name: KernelEntry(layouts=layouts) for name in kernels}
    return SpaceFile(version=1, device_type="cpu", kernels=entries, conversions=list(conversions))


def forms(space: Space, tensor: str) -> set[str]:
    return {choice.by_tensor[tensor] for choice in space.choices if tensor in choice.by_tensor}


@pytest.fixture(scope="module")
def encoder() -> Space:
    return build_space(layer(), load_space(CPU))


VALID = {"version": 1, "device_type": "cpu", "kernels": {"torch_matmul": {}}, "conversions": ["torch_copy"]}


def torch_matmul(**entry: Any) -> dict[str, Any]:
    return {"kernels": {"torch_matmul": entry}}


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"kernels": {"torch_matmull": {}}}, "line 5: kernels: no kernel 'torch_matmull'; known: "),
        ({"conversions": ["copy"]}, "line 2: conversions: no kernel 'copy'; known: "),
        ({"kernel": {}}, "line 4: kernel: no such key; known: version, device_type, max_operators, repeats, kernels"),
        (torch_matmul(layout="all"), "line 6: kernels.torch_matmul.layout: no such key; known: layouts, params, enum"),
        (torch_matmul(layouts="some"), "line 6: kernels.torch_matmul.layouts is 'some'; write 'all' or 'declared'"),
        ({"version": 2}, "line 6: version is 2; write 1"),
        (torch_matmul(params={"block": []}), "kernels.torch_matmul.params: block: []; list one value or more, each"),
        (torch_matmul(params={"block": [1, 2, 1]}), "kernels.torch_matmul.params: block: [1, 2, 1]; list one value"),
        (torch_matmul(params={"block": [{"a": 1}]}), "params.block.0 is {'a': 1}; write a number, a text, true or f"),
        (torch_matmul(params={name: list(range(10)) for name in "abcde"}), "100,000; at most 65,536"),
        (torch_matmul(trials=0), "line 6: kernels.torch_matmul.trials is 0; write a number of 1 or more"),
        (torch_matmul(trials="many"), "kernels.torch_matmul.trials is 'many'; write a whole number"),
        ({"max_operators": 0}, "max_operators is 0; write a number of 1 or more"),
        ({"kernels": ["torch_matmul"]}, "line 4: kernels is ['torch_matmul']; write a mapping"),
        ({"kernels": {"torch_matmul": None}}, "line 5: kernels.torch_matmul is None; write a mapping"),
        ({"conversions": "torch_copy"}, "conversions is 'torch_copy'; write a list"),
        ({"device_type": 3}, "device_type is 3; write a text"),
    ],
)
def test_a_file_that_cannot_be_used_says_in_which_line_what_is_there_and_what_is_valid(
    tmp_path: Path, change: Mapping[str, Any], sentence: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(VALID))
    assert list(load_space(path).kernels) == ["torch_matmul"]
    path.write_text(yaml.safe_dump(VALID | dict(change)))
    with pytest.raises(SpaceError) as raised:
        load_space(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert sentence in message
    assert "pydantic" not in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("version: 1", "device_type is missing: write it; kernels is missing: write it; conversions is missing"),
        ("- a\n- b\n", "it is ['a', 'b']; write a mapping with the keys version, device_type, "),
        ("", "it is None; write a mapping"),
        ("kernels: [", "line 1, column 11: no valid YAML: "),
        ("version: 1\nversion: 1", "line 1, column 1: no valid YAML: key 'version' occurs twice"),
    ],
)
def test_what_is_no_search_space_at_all_is_refused_in_one_line(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(SpaceError) as raised:
        load_space(path)
    assert str(raised.value).startswith(f"{path}: {sentence}")
    assert "\n" not in str(raised.value)


def test_a_missing_file_lists_what_is_in_its_folder(tmp_path: Path) -> None:
    with pytest.raises(SpaceError, match=r"gpu\.yaml: no such search space; in that folder: none"):
        load_space(tmp_path / "gpu.yaml")
    with pytest.raises(SpaceError, match=r"gpu\.yaml: no such search space; in that folder: .*cpu"):
        load_space(CPU.with_name("gpu.yaml"))


def test_what_cannot_be_read_is_said_to_be_so(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, binary):
        with pytest.raises(SpaceError, match="cannot be read"):
            load_space(path)


@pytest.mark.slow
def test_kernels_that_need_another_vendors_device_are_not_offered() -> None:
    graph = layer("bfloat16")
    found = {
        vendor: {choice.candidate.kernel for choice in build_space(graph, space_file("cuda"), vendor=vendor).choices}
        for vendor in (None, "nvidia", "amd")
    }
    assert found["nvidia"] == found[None]
    assert found["amd"] < found["nvidia"]
    assert not [name for name in found["amd"] if name.startswith(("cublaslt_", "cudnn_", "cupy_"))]
    assert {"cublas_matmul", "inductor"} <= found["amd"]


def test_every_kernel_is_described_for_the_cpu_or_for_cuda() -> None:
    found, other = describe(load_space(CPU)), describe(space_file("cuda"))
    assert found["device_type"] == "cpu"
    assert "torch_copy" in found["conversions"]
    assert found["kernels"]["torch_matmul_bias"] == {
        "covers": ["contraction", "bias"], "layouts": "all", "params": {}, "cells": "enumerated", "combinations": 1,
        "tried": 1,
    }  # fmt: skip
    listed = set().union(*(part[name] for part in (found, other) for name in ("kernels", "conversions")))
    assert listed == {kernel.name for kernel in KERNELS}


def test_what_the_caller_gives_and_gets_lies_as_declared() -> None:
    graph = layer()
    given = given_forms(graph)
    for name in ("x", "grad_x", "y", "grad_y", "linear1_weight", "grad_linear1_weight", "key_weight", "linear1_bias"):
        assert given[name] == (graph.tensors[name].axes,)
    assert "activation" not in given
    assert "grad_activation" not in given


def test_choices_of_one_product_and_its_bias(tmp_path: Path) -> None:
    space = build_space(linear(tmp_path), file("torch_matmul", "torch_bias", "torch_matmul_bias"))
    assert Counter(choice.candidate.kernel for choice in space.choices) == {
        "torch_matmul": 8, "torch_bias": 2, "torch_matmul_bias": 8,
    }  # fmt: skip
    assert forms(space, "weight") == {"fh", "hf"}
    assert space.given == {"x": ("bh",), "weight": ("fh",), "offset": ("f",), "y": ("bf",)}
    fused = next(choice for choice in space.choices if choice.candidate.kernel == "torch_matmul_bias")
    assert fused.cover.operators == ("product", "y")
    assert set(fused.by_tensor) == {"x", "weight", "offset", "y"}


def test_conversions_lead_from_what_is_made_to_what_is_read(tmp_path: Path) -> None:
    space = build_space(linear(tmp_path), file("torch_matmul", "torch_bias"))
    pairs = {(c.tensor, c.source, c.target) for c in space.conversions}
    assert pairs == {
        ("x", "bh", "hb"), ("weight", "fh", "hf"),
        ("product", "bf", "fb"), ("product", "fb", "bf"), ("y", "fb", "bf"),
    }  # fmt: skip


def test_without_conversions_what_reads_a_form_that_nobody_makes_is_dropped(tmp_path: Path) -> None:
    space = build_space(linear(tmp_path), file("torch_matmul", "torch_bias", conversions=()))
    assert space.conversions == ()
    assert (forms(space, "x"), forms(space, "product"), forms(space, "y")) == ({"bh"}, {"bf"}, {"bf"})
    assert forms(space, "weight") == {"fh"}
    assert len(space.choices) == 1 + 1


@pytest.mark.slow
def test_no_choice_asks_for_a_slice_that_nobody_writes(encoder: Space) -> None:
    made = {text for name, own in encoder.given.items() if name not in encoder.graph.producers for text in own}
    made |= {choice.by_tensor[name] for choice in encoder.choices for name in choice.cover.outputs}
    read = {choice.by_tensor[name] for choice in encoder.choices for name in choice.cover.inputs}
    slices = {text for text in read if "@" in text}
    assert slices
    assert slices <= made


@pytest.mark.slow
def test_a_mask_that_is_made_in_one_storage_only_is_read_in_that_one() -> None:
    kernels = [name for name in load_space(CPU).kernels if name != "torch_random_bits"]
    everything = build_space(layer(), file(*kernels))
    assert {text.partition(":")[2] for text in forms(everything, "output_dropout_mask")} == {"", "byte"}
    KERNELS.add(KERNELS_WITHOUT_BYTES)
    try:
        raw = build_space(layer(), file(*(k for k in kernels if k != "torch_bernoulli"), KERNELS_WITHOUT_BYTES.name))
    finally:
        del KERNELS._kernels[KERNELS_WITHOUT_BYTES.name]
    assert {text.partition(":")[2] for text in forms(raw, "output_dropout_mask")} == {""}
    assert not any(":byte" in text for choice in raw.choices for text in choice.forms)


def raw_only(subgraph: Any) -> Any:
    return (row for row in KERNELS["torch_bernoulli"].layouts(subgraph) if ":byte" not in row[0])


KERNELS_WITHOUT_BYTES = type(KERNELS["torch_bernoulli"])(
    "draws_raw_masks", ("dropout_mask",), KERNELS["torch_bernoulli"].runs, layouts=raw_only
)


def test_declared_layouts_leave_one_row_per_kernel_and_storage(tmp_path: Path) -> None:
    space = build_space(linear(tmp_path), file("torch_matmul", "torch_bias", layouts="declared"))
    assert [choice.forms for choice in space.choices] == [("bh", "fh", "bf"), ("bf", "f", "bf")]
    masks = build_space(layer(), file(*load_space(CPU).kernels, layouts="declared"))
    assert forms(masks, "activation_dropout_mask") == {"blf", "blf:byte"}


def test_parameters_multiply_out(tmp_path: Path) -> None:
    asked = file("torch_matmul", "torch_bias", layouts="declared")
    asked.kernels["torch_bias"].params = {"block": [1, 2], "warps": [4]}
    space = build_space(linear(tmp_path), asked)
    params = [choice.candidate.params for choice in space.choices if choice.candidate.kernel == "torch_bias"]
    assert params == [(("block", 1), ("warps", 4)), (("block", 2), ("warps", 4))]
    assert len({choice.call.key for choice in space.choices}) == 3


def never_more_than_64(_subgraph: Subgraph, candidate: Candidate) -> str | None:
    block = dict(candidate.params)["block"]
    return f"block {block} is larger than 64" if int(block) > 64 else None


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A bias with launch parameters, of which it refuses some; in every layout that a bias takes."""
    kernel = replace(KERNELS["torch_bias"], name="blocked_bias", refuses=never_more_than_64)
    monkeypatch.setitem(KERNELS._kernels, kernel.name, kernel)
    return kernel


def sampled_space(graph: Graph, params: dict[str, list[Scalar]], **asked: Any) -> Space:
    entries = file("torch_matmul", "torch_bias_grad").kernels
    entries["blocked_bias"] = KernelEntry(params=params, **asked)
    return build_space(graph, SpaceFile(version=1, device_type="cpu", kernels=entries, conversions=["torch_copy"]))


def test_a_cell_with_many_combinations_is_held_with_those_to_start_with(tmp_path: Path, blocked: Kernel) -> None:
    params: dict[str, list[Scalar]] = {"block": [8, 16, 32, 64, 128], "warps": [1, 2, 4], "stages": [1, 2, 3]}
    space = sampled_space(linear(tmp_path), params, trials=12)
    assert sorted(cell.call.subgraph.nodes[0].spec for cell in space.cells) == ["ab,a->ab", "ab,b->ab"]  # two layouts
    for cell in space.cells:
        assert (cell.kernel, len(cell.combinations), cell.trials) == (blocked.name, 4 * 3 * 3, 12)
        tried = [tuple(dict(c.candidate.params).values()) for c in space.calls.values() if cell.key == bare(c)]
        assert tried == [(8, 1, 1), (32, 2, 2)]  # the last of each list is refused


def test_where_a_kernel_refuses_every_start_the_first_that_it_admits_is_one(tmp_path: Path, blocked: Kernel) -> None:
    space = sampled_space(linear(tmp_path), {"block": [128, 64, 256, 512], "warps": [4, 2]}, enumerate_up_to=1)
    params = {choice.candidate.params for choice in space.choices if choice.candidate.kernel == blocked.name}
    assert params == {(("block", 64), ("warps", 4))}


@pytest.mark.parametrize("up_to, cells", [(5, 2), (6, 0), (8, 0)])
def test_a_cell_is_enumerated_where_few_combinations_are_admitted(
    tmp_path: Path, blocked: Kernel, up_to: int, cells: int
) -> None:
    space = sampled_space(linear(tmp_path), {"block": [16, 32, 64, 128], "warps": [1, 2]}, enumerate_up_to=up_to)
    assert len(space.cells) == cells
    found = {choice.candidate.params for choice in space.choices if choice.candidate.kernel == blocked.name}
    assert len(found) == (2 if cells else 6)


def test_a_kernel_that_refuses_all_has_no_cell(tmp_path: Path, blocked: Kernel) -> None:
    space = sampled_space(linear(tmp_path), {"block": [128, 256], "warps": [1, 2]}, enumerate_up_to=1)
    assert space.cells == ()
    assert not any(choice.candidate.kernel == blocked.name for choice in space.choices)


@pytest.mark.usefixtures("blocked")
def test_what_is_tried_of_a_cell_becomes_a_choice_wherever_the_cell_is(tmp_path: Path) -> None:
    space = sampled_space(linear(tmp_path), {"block": [8, 16, 32], "warps": [1, 2]}, enumerate_up_to=2)
    cell = space.cells[0]
    call = cell.called((("block", 16), ("warps", 1)))
    assert call.key not in space.calls
    tried = space.with_calls([call, call])
    assert tried.calls.keys() - space.calls.keys() == {call.key}
    places = {(c.cover, c.forms) for c in space.choices if bare(c.call) == cell.key}
    assert {(c.cover, c.forms) for c in tried.choices if c.call.key == call.key} == places
    assert len(tried.choices) == len(space.choices) + len(places)
    assert tried.with_calls([call]) is tried


def bare(call: Call) -> str:
    return without_params(call).key


def test_a_kernel_with_many_combinations_is_described_as_sampled() -> None:
    asked = file("torch_matmul", "torch_bias")
    asked.kernels["torch_bias"] = KernelEntry(params={"block": list(range(10)), "warps": [1, 2, 4, 8]}, trials=20)
    described = describe(asked)["kernels"]["torch_bias"]
    assert (described["cells"], described["combinations"], described["tried"]) == ("sampled", 40, 20)
    asked.kernels["torch_bias"].enumerate_up_to = 40
    described = describe(asked)["kernels"]["torch_bias"]
    assert (described["cells"], described["combinations"], described["tried"]) == ("enumerated", 40, 40)


def test_every_choice_of_the_layer_fits_its_tensors_and_its_kernel(encoder: Space) -> None:
    assert len(encoder.choices) > 2000
    for choice in encoder.choices:
        assert len(choice.forms) == len(choice.cover.inputs + choice.cover.outputs) == len(choice.candidate.forms)
        for name, text in choice.by_tensor.items():
            Form.parse(text).placed(encoder.graph.tensors[name].axes, encoder.graph.shape(name))


def test_every_form_that_is_read_is_made_or_can_be_converted_to(encoder: Space) -> None:
    made: dict[str, set[str]] = {n: set(f) for n, f in encoder.given.items() if n not in encoder.graph.producers}
    for choice in encoder.choices:
        for name in choice.cover.outputs:
            made.setdefault(name, set()).add(choice.by_tensor[name])
    for choice in encoder.choices:
        for name in choice.cover.inputs:
            form = choice.by_tensor[name]
            assert form in made[name] or any(convertible(source, form) for source in made[name]), (name, form)


def test_every_form_that_the_caller_may_get_is_made_by_some_choice(encoder: Space) -> None:
    for name in encoder.graph.outputs:
        assert set(encoder.given[name]) <= forms(encoder, name), name


def test_siblings_are_pitched_together(encoder: Space) -> None:
    together = 0
    for choice in encoder.choices:
        for text in choice.forms:
            group = text.partition("#")[2]
            for sibling in group.split("+") if group else ():
                if sibling in choice.by_tensor:
                    assert choice.by_tensor[sibling].endswith("#" + group)
                    together += 1
    assert together > 100


def test_equal_calls_are_measured_once(encoder: Space) -> None:
    assert len(encoder.calls) < (len(encoder.choices) + len(encoder.conversions)) / 2
    assert {choice.call.key for choice in encoder.choices} <= set(encoder.calls)
    assert {conversion.call.key for conversion in encoder.conversions} <= set(encoder.calls)


def test_refused_candidates_are_not_in_the_space(encoder: Space) -> None:
    graph = encoder.graph
    named = {operator.name: operator for operator in graph.operators}
    for choice in encoder.choices[::7]:
        cover = choice.cover
        subgraph = graph.subgraph([named[n] for n in cover.recomputed + cover.operators], cover.inputs, cover.outputs)
        assert KERNELS[choice.candidate.kernel].refuses(subgraph, choice.candidate) is None


def test_names_of_operators_do_not_reach_calls(encoder: Space) -> None:
    for call in list(encoder.calls.values())[::10]:
        assert "projection" not in str(call.to_json())


@pytest.mark.parametrize(
    "source, target, possible",
    [
        ("bf", "fb", True),
        ("bf", "bf", False),
        ("absent", "bf", False),
        ("bf:byte", "fb:byte", True),
        ("bf:byte", "fb", False),
        ("b*f@0/3", "bf", True),
        ("bf", "b*f@0/3", False),
        ("f", "f", False),
    ],
)
def test_a_conversion_changes_the_order_of_two_axes_or_more(source: str, target: str, possible: bool) -> None:
    assert convertible(source, target) is possible


@pytest.mark.parametrize(
    "source, target, possible",
    [
        ("bf", "bf:bit", True),
        ("bf:bit", "bf:byte", True),
        ("bf:seed", "bf", True),
        ("bf:byte", "bf", True),
        ("bf", "bf:seed", False),
        ("bf:bit", "bf:seed", False),
        ("bf", "fb:bit", False),
        ("bf:bit", "fb:bit", False),
    ],
)
def test_to_save_memory_a_mask_changes_its_storage_in_one_order(source: str, target: str, possible: bool) -> None:
    assert convertible(source, target, changing_formats("exact", saving=True)) is possible
    assert not convertible(source, target)


@pytest.mark.slow
def test_to_save_memory_a_space_has_seeds_and_changes_of_storage_beside_all_that_it_had(encoder: Space) -> None:
    saving = build_space(layer(), load_space(CPU), saving=True)
    mask = "output_dropout_mask"
    assert not any(":bit" in text or ":seed" in text for choice in encoder.choices for text in choice.forms)
    assert forms(saving, mask) == forms(encoder, mask) | {"blh:seed"}
    plainly = {(choice.cover.operators, choice.forms, choice.call.key) for choice in encoder.choices}
    assert plainly < {(choice.cover.operators, choice.forms, choice.call.key) for choice in saving.choices}
    assert set(encoder.conversions) < set(saving.conversions)
    changes = [c for c in saving.conversions if c.candidate.kernel != "torch_copy"]
    assert {(c.source, c.target, c.candidate.kernel) for c in changes if (c.tensor, c.source[:3]) == (mask, "blh")} == {
        ("blh", "blh:byte", "inductor_cast"), ("blh:byte", "blh", "inductor_cast"),
        ("blh", "blh:bit", "inductor_pack"), ("blh:byte", "blh:bit", "inductor_pack"),
        ("blh:bit", "blh", "inductor_unpack"), ("blh:bit", "blh:byte", "inductor_unpack"),
        ("blh:seed", "blh", "inductor_expand"), ("blh:seed", "blh:byte", "inductor_expand"),
    }  # fmt: skip
    assert {c.tensor.rpartition("_")[2] for c in changes} == {"mask"}
    assert {c.call.subgraph.nodes[0].attributes for c in changes} == {(("p", 0.1),)}


@pytest.mark.slow
def test_to_save_memory_relus_result_may_be_held_as_signs() -> None:
    graph = layer(activation="relu")
    saving, plainly = (build_space(graph, load_space(CPU), saving=saving) for saving in (True, False))
    assert forms(saving, "activation") == forms(plainly, "activation") | {"blf:sign"}
    signs = [each for each in saving.conversions if each.target.endswith(":sign")]
    assert {(each.tensor, each.source, each.target) for each in signs} == {("activation", "blf", "blf:sign")}
    assert not any("sign" in text for choice in plainly.choices for text in choice.forms)


def test_a_slice_with_the_stack_outermost_is_an_ordinary_tensor() -> None:
    assert plain("*nph@1/3#a+b+c") == "nph"
    assert plain("bl*np@1/3#a+b+c") == "bl*np@1/3#a+b+c"
    assert plain("blh:byte") == "blh:byte"


TWICE = """
version: 1
name: twice
dtype: float32
axes: {b: rows, h: features, f: outputs}
inputs: {x: {axes: bh}}
parameters: {w: fh, v: fh}
operators:
  - {name: y, kind: contraction, spec: "bh,fh->bf", inputs: [x, w], outputs: [y]}
  - {name: again, kind: contraction, spec: "bh,fh->bf", inputs: [x, w], outputs: [again]}
  - {name: other, kind: contraction, spec: "bh,fh->bf", inputs: [x, v], outputs: [other]}
outputs: [y, again, other]
"""
POOLED = """
version: 1
name: pooled
dtype: float32
axes: {b: images, n: heads, k: patches, p: features}
inputs: {x: {axes: bnkp}, weights: {axes: bnk}}
parameters: {}
operators:
  - {name: y, kind: contraction, spec: "bnk,bnkp->bnp", inputs: [weights, x], outputs: [y]}
outputs: [y]
"""


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("text", [TWICE, POOLED], ids=["a weight that is read twice", "one query that pools an image"])
def test_products_that_are_no_stack_and_have_no_rows_are_enumerated(
    text: str, device_type: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    extents = {"b": 2, "h": 3, "f": 4} if text is TWICE else {"b": 2, "n": 2, "k": 5, "p": 3}
    graph = training_graph(load_model(str(path)).instantiate(extents=extents).graph())
    space = build_space(graph, space_file(device_type))
    made = {tensor for choice in space.choices for tensor in choice.by_tensor}
    assert made >= {*graph.producers}
    stacked = {tensor for choice in space.choices for tensor, form in choice.by_tensor.items() if "@" in form}
    assert ({"y", "other"} <= stacked) == (text is TWICE)
    assert "again" not in stacked


def test_conversions_to_8_bits_are_offered_where_they_are_allowed_and_only_there() -> None:
    graph, file = layer(), load_space(CPU)
    for saving in (False, True):
        exact = build_space(graph, file, saving=saving)
        allowed = build_space(graph, file, saving=saving, numerics="8-bit")
        assert not exact.narrow_calls
        assert exact.exact is exact
        assert not any("int8" in text for call in exact.calls.values() for text in call.candidate.forms)
        assert allowed.calls.keys() - exact.calls.keys() == allowed.narrow_calls != set()
        assert allowed.exact.calls.keys() == exact.calls.keys()
        assert allowed.choices == exact.choices
