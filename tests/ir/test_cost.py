import pytest

from autotuner.ir.autodiff import training_graph
from autotuner.ir.cost import (
    Cost,
    analyse,
    form_bytes,
    fused_bytes,
    memory_usage_efficiency,
    moved_bytes,
    operator_flop,
    reduction,
    tensor_bytes,
)
from autotuner.ir.graph import Graph
from autotuner.ir.models import load_model


def encoder(preset: str, dtype: str = "float32") -> Graph:
    return training_graph(load_model("bert-encoder").instantiate(preset, dtype=dtype).graph())


def test_the_contractions_of_the_large_preset_are_312_gibiflop() -> None:
    analysis = analyse(encoder("large"))
    assert analysis.by_class["contraction"].flop == 312 * 2**30
    assert sum(row.kind == "contraction" for row in analysis.rows) == 24


def test_contractions_are_nearly_all_flop_and_less_than_half_of_the_bytes() -> None:
    analysis = analyse(encoder("large", "bfloat16"))
    assert analysis.by_class["contraction"].flop / analysis.total.flop > 0.99
    assert analysis.by_class["contraction"].moved_bytes / analysis.total.moved_bytes < 0.5
    assert sum(cost.flop for cost in analysis.by_class.values()) == analysis.total.flop
    assert sum(cost.moved_bytes for cost in analysis.by_class.values()) == analysis.total.moved_bytes


def test_a_row_states_what_can_be_counted_by_hand() -> None:
    # b 4, l 64, h 128, n 4, p 32: x and y have 32768 elements, the statistics 256, scale and bias 128 each.
    rows = {row.operator: row for row in analyse(encoder("tiny")).rows}
    assert rows["query_projection"].cost == Cost(2 * 4 * 64 * 128 * 128, 4 * (32768 + 16384 + 32768))
    assert rows["query_projection"].cost.intensity == pytest.approx(8388608 / 327680)
    assert rows["y"].cost == Cost(7 * 32768, 4 * (2 * 32768 + 2 * 128 + 2 * 256))
    assert rows["grad_linear2_bias"].cost == Cost(32768, 4 * (32768 + 128))
    assert rows["output_dropout_mask"].cost.moved_bytes == 4 * 32768
    assert (rows["y"].operator_class, rows["y"].phase) == ("normalisation", "forward")
    assert (rows["grad_x"].operator_class, rows["grad_x"].phase) == ("element-wise", "backward")


def test_an_optional_tensor_is_not_counted() -> None:
    graph = encoder("tiny")
    rows = {row.operator: row for row in analyse(graph).rows}
    scores = tensor_bytes(graph, "scores")
    assert rows["attention"].cost.moved_bytes == 2 * scores
    assert rows["grad_scaled_scores"].cost.moved_bytes == 3 * scores


def test_bytes_follow_the_dtype_of_each_tensor() -> None:
    graph = encoder("tiny", "bfloat16")
    assert tensor_bytes(graph, "x") == 2 * 32768
    assert tensor_bytes(graph, "norm1_mean") == 4 * 256


def test_flop_of_a_contraction_counts_each_letter_once() -> None:
    graph = encoder("tiny")
    assert operator_flop(graph, graph.producers["scores"]) == 2 * 4 * 4 * 64 * 64 * 32


def test_a_fused_kernel_moves_its_boundary_only() -> None:
    graph = encoder("tiny")
    unfused = [(o.inputs, o.outputs) for o in graph.operators if o.name in ("linear1_biased", "activation")]
    fused = [(("linear1", "linear1_bias"), ("linear1_biased", "activation"))]
    wide = 4 * 64 * 512 * 4
    assert fused_bytes(graph, unfused) == 4 * wide + 512 * 4
    assert fused_bytes(graph, fused) == 3 * wide + 512 * 4
    assert fused_bytes(graph, [(("x", "x"), ())]) == tensor_bytes(graph, "x")


def test_a_cover_per_operator_moves_what_the_analysis_counts() -> None:
    graph = encoder("tiny")
    covers = [
        (
            [t for t in o.inputs if not graph.tensors[t].optional],
            [t for t in o.outputs if not graph.tensors[t].optional],
        )
        for o in graph.operators
    ]
    assert fused_bytes(graph, covers) == analyse(graph).total.moved_bytes


def test_reduction_is_in_percent_of_the_unfused() -> None:
    assert reduction(200, 150) == 25.0


def test_memory_usage_efficiency_is_full_at_the_peak_without_waste() -> None:
    # 1 MB in 1 us is 1000 GB/s.
    assert memory_usage_efficiency(1e6, 1e6, 1.0, 1000.0) == pytest.approx(100.0)
    assert memory_usage_efficiency(1e6, 2e6, 4.0, 1000.0) == pytest.approx(25.0)


def test_bytes_are_those_of_the_form_that_a_tensor_has() -> None:
    sites = dict.fromkeys(("attention_dropout", "output_dropout", "activation_dropout", "feed_forward_dropout"), 0.1)
    graph = load_model("bert-encoder").instantiate("tiny", options=sites).graph()
    mask, elements = "output_dropout_mask", graph.elements("output_dropout_mask")
    sizes = {text: form_bytes(graph, mask, text) for text in ("blh", "lbh:byte", "blh:bit", "hlb:seed", "absent")}
    assert sizes == {"blh": 4 * elements, "lbh:byte": elements, "blh:bit": elements // 8, "hlb:seed": 8, "absent": 0}
    assert form_bytes(graph, "query", "bl*np@1/3#query+key+value") == tensor_bytes(graph, "query")
    steps = [[(mask, "blh:seed"), (mask, "blh")], [(mask, "blh"), (mask, "blh")]]
    assert moved_bytes(graph, steps) == 8 + 2 * sizes["blh"]
