from autotuner.ir.autodiff import training_graph
from autotuner.ir.cost import (
    form_bytes,
    fused_bytes,
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
    graph = encoder("large")
    contractions = [o for o in graph.operators if o.kind == "contraction"]
    assert sum(operator_flop(graph, o) for o in contractions) == 312 * 2**30
    assert len(contractions) == 24


def test_flop_of_an_operator_can_be_counted_by_hand() -> None:
    # b 4, l 64, h 128: x and y have 32768 elements.
    graph = encoder("tiny")
    flop = {o.name: operator_flop(graph, o) for o in graph.operators}
    assert flop["query_projection"] == 2 * 4 * 64 * 128 * 128
    assert flop["y"] == 7 * 32768
    assert flop["grad_linear2_bias"] == 32768


def test_flop_of_what_llama_adds_can_be_counted_by_hand() -> None:
    # b 2, l 32, h 64: x has 4096 elements; 4 query heads and 2 key heads of 16 features; f 176.
    graph = training_graph(load_model("llama-block").instantiate("tiny").graph())
    flop = {o.name: operator_flop(graph, o) for o in graph.operators}
    assert flop["norm1"] == 4 * 4096
    assert flop["query"] == 3 * 2 * 32 * 4 * 16
    assert flop["key"] == 3 * 2 * 32 * 2 * 16
    assert flop["activation"] == 4 * 2 * 32 * 176
    assert flop["gated"] == 2 * 32 * 176
    assert flop["grad_query_projection"] == flop["query"]


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


def test_reduction_is_in_percent_of_the_unfused() -> None:
    assert reduction(200, 150) == 25.0


def test_bytes_are_those_of_the_form_that_a_tensor_has() -> None:
    sites = dict.fromkeys(("attention_dropout", "output_dropout", "activation_dropout", "feed_forward_dropout"), 0.1)
    graph = load_model("bert-encoder").instantiate("tiny", options=sites).graph()
    mask, elements = "output_dropout_mask", graph.elements("output_dropout_mask")
    sizes = {text: form_bytes(graph, mask, text) for text in ("blh", "lbh:byte", "blh:bit", "hlb:seed", "absent")}
    assert sizes == {"blh": 4 * elements, "lbh:byte": elements, "blh:bit": elements // 8, "hlb:seed": 8, "absent": 0}
    assert form_bytes(graph, "query", "bl*np@1/3#query+key+value") == tensor_bytes(graph, "query")
    steps = [[(mask, "blh:seed"), (mask, "blh")], [(mask, "blh"), (mask, "blh")]]
    assert moved_bytes(graph, steps) == 8 + 2 * sizes["blh"]
