"""Which operators one kernel may cover: on hand-made graphs that show one thing each, and on the encoder layer."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations

import pytest

import autotuner.kernels.rules  # noqa: F401  (registers every kernel)
from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph, Operator, Tensor
from autotuner.ir.models import load_model
from autotuner.kernels import KERNELS
from autotuner.kernels.patterns import Attention
from autotuner.kernels.rules.attention import (
    BIASED_FORWARD,
    CAUSAL_FORWARD,
    DROPPING,
    FORWARD,
    MASKED_FORWARD,
    attention_grad,
)
from autotuner.kernels.rules.fused import FUSIBLE
from autotuner.space.fusion import (
    Cover,
    Reach,
    boundary,
    covers,
    stack_families,
    stack_groups,
)
from autotuner.space.fusion import attention as matching
from autotuner.space.fusion.cover import Boundary
from tests.kernels.interpreted import adding
from tests.kernels.library import LIBRARY

SITES = ("attention_dropout", "output_dropout", "activation_dropout", "feed_forward_dropout")
ALL = tuple(kernel.name for kernel in KERNELS)
ODD = {"b": 3, "l": 5, "h": 6, "n": 2, "p": 3, "f": 7}
GROUPED = {"b": 3, "l": 5, "h": 6, "g": 2, "r": 2, "p": 4, "f": 7}
PROJECTIONS = ("query_projection", "key_projection", "value_projection")


def encoder(p: float = 0.1, **options: bool | str) -> Graph:
    return training_graph(load_model("bert-encoder").instantiate(None, ODD, dict.fromkeys(SITES, p) | options).graph())


def decoder(p: float = 0.1) -> Graph:
    return training_graph(load_model("gpt-block").instantiate(None, ODD, dict.fromkeys(SITES, p)).graph())


def graph(*steps: str, outputs: Iterable[str] = ()) -> Graph:
    """Return a graph of element-wise operators over `ab`, each written "out = in" or "out = in + in"."""
    operators = []
    for step in steps:
        out, _, right = step.partition(" = ")
        read = tuple(right.split(" + "))
        kind, spec = ("add", "ab,ab->ab") if len(read) == 2 else ("relu", "ab->ab")
        operators.append(Operator(out, kind, spec, read, (out,)))
    made = {operator.name for operator in operators}
    given = {name for operator in operators for name in operator.inputs} - made
    tensors = {name: Tensor(name, "ab", "float32", "input" if name in given else "activation") for name in given | made}
    return Graph("made up", {"a": 2, "b": 3}, tensors, tuple(operators), tuple(outputs))


def members(of: Graph, *names: str) -> list[Operator]:
    return [operator for operator in of.operators if operator.name in names]


def found(of: Graph, kernel: str) -> list[Cover]:
    return [cover for cover in covers(of, ALL) if kernel in cover.kernels]


def forward_of(of: Graph, kinds: tuple[str, ...] = FORWARD) -> list[tuple[tuple[Operator, ...], Boundary]]:
    return list(matching.attention_forward(of, Attention(kinds)))


def backward_of(
    of: Graph, kinds: tuple[str, ...] = FORWARD
) -> list[tuple[tuple[Operator, ...], Boundary, tuple[Operator, ...]]]:
    return list(matching.attention_grad(of, attention_grad(kinds)))


DIAMOND = graph("a = x", "b = a", "c = a", "d = b + c", outputs=["d"])
# A comes before B by a1 and b1, and after it by b2 and a2.
CROSSED = graph("a1 = x", "b1 = a1", "b2 = y", "a2 = b2", outputs=["b1", "a2"])


@pytest.mark.parametrize(
    "names, convex",
    [("a", True), ("ab", True), ("abcd", True), ("bc", True), ("abd", False), ("ad", False), ("bcd", True)],
)
def test_a_cover_is_convex_where_no_path_leaves_it_and_comes_back(names: str, convex: bool) -> None:
    assert Reach(DIAMOND).convex(members(DIAMOND, *names)) is convex


def test_two_covers_that_each_need_the_other_are_cyclic() -> None:
    reach = Reach(CROSSED)
    first, second = members(CROSSED, "a1", "a2"), members(CROSSED, "b1", "b2")
    assert reach.convex(first)
    assert reach.convex(second)
    assert reach.cyclic(first, second)
    assert reach.cyclic(second, first)
    assert not reach.cyclic(members(CROSSED, "a1"), members(CROSSED, "b1"))
    assert not reach.cyclic(first, members(CROSSED, "b2"))


def test_a_boundary_holds_what_crosses_it_and_what_the_caller_gets() -> None:
    assert boundary(DIAMOND, members(DIAMOND, "b", "c", "d")) == (("a",), ("d",))
    assert boundary(DIAMOND, members(DIAMOND, "a", "b")) == (("x",), ("a", "b"))
    kept = graph("a = x", "b = a", outputs=["a", "b"])
    assert boundary(kept, members(kept, "a", "b")) == (("x",), ("a", "b"))


def test_connected_sets_are_bounded_in_size() -> None:
    chain = graph(*(f"t{i + 1} = t{i}" for i in range(6)), outputs=["t6"])
    sizes = {len(cover.operators) for cover in covers(chain, ["inductor"], max_operators=4)}
    assert sizes == {2, 4}
    assert {len(cover.operators) for cover in covers(chain, ["inductor"], max_operators=8)} == {6}


def test_a_kernel_that_is_not_named_covers_nothing() -> None:
    assert covers(DIAMOND, ["torch_relu"]) == tuple(
        Cover((name,), (read,), (name,), ("torch_relu",)) for name, read in (("a", "x"), ("b", "a"), ("c", "a"))
    )
    assert covers(DIAMOND, []) == ()


def test_a_product_that_others_read_as_well_is_not_merged_with_its_follower() -> None:
    tensors = {
        name: Tensor(name, axes, "float32", "activation" if name in ("u", "v", "w") else "input")
        for name, axes in {"x": "ab", "weight": "cb", "vector": "c", "u": "ac", "v": "ac", "w": "ac"}.items()
    }
    product = Operator("u", "contraction", "ab,cb->ac", ("x", "weight"), ("u",))
    bias = Operator("v", "bias", "ac,c->ac", ("u", "vector"), ("v",))
    again = Operator("w", "relu", "ac->ac", ("u",), ("w",))
    alone = Graph("one reader", {"a": 2, "b": 3, "c": 4}, tensors, (product, bias), ("v",))
    shared = Graph("two readers", alone.extents, tensors, (product, bias, again), ("v", "w"))
    assert [cover.operators for cover in found(alone, "torch_matmul_bias")] == [("u", "v")]
    assert found(shared, "torch_matmul_bias") == []


@pytest.mark.parametrize("options", [{"p": 0.1}, {"p": 0.0}, {"p": 0.0, "attention_mask": True, "activation": "relu"}])
def test_every_operator_of_the_layer_is_covered_alone_and_covers_are_convex(options: dict[str, float]) -> None:
    layer = encoder(**options)  # type: ignore[arg-type]
    named = {operator.name: operator for operator in layer.operators}
    reach = Reach(layer)
    everything = covers(layer, ALL)
    assert {cover.operators[0] for cover in everything if len(cover.operators) == 1} == set(named)
    assert len({(cover.operators, cover.inputs, cover.outputs) for cover in everything}) == len(everything)
    for cover in everything:
        own = [named[name] for name in cover.operators]
        assert reach.convex(own)
        for kernel in cover.kernels:
            if len(KERNELS[kernel].covers) == 1:
                assert KERNELS[kernel].covers == (own[0].kind,)
        if cover.kernels == ("inductor",):
            assert {operator.kind for operator in own} <= FUSIBLE
            assert len({operator.phase for operator in own}) == 1


def test_projections_are_stacked_in_threes_and_in_neighbouring_pairs() -> None:
    groups = [tuple(operator.name for operator in group.operators) for group in stack_groups(encoder())]
    assert groups == [PROJECTIONS, PROJECTIONS[:2], PROJECTIONS[1:]]
    for kernel, suffixes in (
        ("torch_stacked_matmul_bias", 3),
        ("torch_stacked_bias", 3),
        ("torch_stacked_bias_grad", 3),
        ("torch_stacked_matmul", 9),
    ):
        assert len(found(encoder(), kernel)) == suffixes, kernel


def test_stacked_covers_hold_all_members_with_their_biases_or_sums() -> None:
    stacked = {cover.operators for cover in found(encoder(), "torch_stacked_matmul")}
    assert PROJECTIONS in stacked
    assert ("grad_query_weight", "grad_key_weight", "grad_value_weight") in stacked
    inputs = next(names for names in stacked if names[0].startswith("grad_x_from") and len(names) == 6)
    assert inputs[3:] == ("grad_x_sum_1", "grad_x_sum_2", "grad_x")
    biased = {cover.operators for cover in found(encoder(), "torch_stacked_matmul_bias")}
    assert (*PROJECTIONS, "query", "key", "value") in biased


def test_slices_of_stacks_come_in_families() -> None:
    families = stack_families(encoder())
    for family in (
        PROJECTIONS,
        ("query", "key", "value"),
        ("query_weight", "key_weight", "value_weight"),
        ("grad_query_weight", "grad_key_weight", "grad_value_weight"),
        ("grad_query_bias", "grad_key_bias", "grad_value_bias"),
        ("grad_query", "grad_key", "grad_value"),
        ("query", "key"),
        ("key", "value"),
    ):
        assert family in families, family
    assert ("query", "value") not in families
    assert len(set(families)) == len(families)


def test_products_take_their_bias_their_sum_or_their_scale_along() -> None:
    layer = encoder()
    assert [cover.operators for cover in found(layer, "torch_matmul_scale")] == [("scores", "scaled_scores")]
    assert len(found(layer, "torch_matmul_bias")) == 6
    sums = [cover.operators[1] for cover in found(layer, "torch_matmul_add")]
    assert sums == ["grad_norm1", "grad_x_sum_1", "grad_x_sum_2", "grad_x"]


def test_a_weights_gradient_takes_the_gradient_of_its_bias_along() -> None:
    layer = encoder()
    pairs = {cover.operators: cover for cover in found(layer, "cublaslt_matmul_bias_grad")}
    assert set(pairs) == {
        ("grad_linear2_bias", "grad_linear2_weight"),
        ("grad_linear1_bias", "grad_linear1_weight"),
        ("grad_output_bias", "grad_output_weight"),
        ("grad_value_bias", "grad_value_weight"),
        ("grad_key_bias", "grad_key_weight"),
        ("grad_query_bias", "grad_query_weight"),
    }
    assert pairs["grad_linear2_bias", "grad_linear2_weight"].inputs == ("grad_linear2_biased", "activation_dropped")
    stacked = [cover.operators for cover in found(layer, "cublaslt_stacked_matmul_bias_grad")]
    assert (
        "grad_query_weight", "grad_key_weight", "grad_value_weight", "grad_query_bias", "grad_key_bias",
        "grad_value_bias",
    ) in stacked  # fmt: skip


def test_fused_sets_of_the_paper_are_there() -> None:
    sets = {cover.operators for cover in found(encoder(), "inductor")}
    for names in (
        ("scaled_scores", "attention", "attention_dropped"),
        ("output_biased", "output_dropped", "residual1", "norm1"),
        ("linear1_biased", "activation", "activation_dropped"),
        ("linear2_biased", "feed_forward_dropped", "residual2", "y"),
        ("grad_activation", "grad_linear1_biased", "grad_linear1_bias"),
        ("grad_attention", "grad_scaled_scores", "grad_scores"),
    ):
        assert names in sets, names


def test_sets_come_without_the_sums_that_kernels_of_products_make() -> None:
    graph = training_graph(load_model("llama-block").instantiate("tiny").graph())
    sets = {cover.operators for cover in covers(graph, ("inductor",))}
    summed, *behind = "grad_norm2", "grad_norm2_scale", "grad_residual1_from_norm2", "grad_residual1"
    assert [graph.producers[tensor].kind for tensor in graph.producers[summed].inputs] == ["contraction"] * 2
    assert {(summed, *behind), tuple(behind)} <= sets


def test_attention_is_one_cover_only_where_nothing_stands_between() -> None:
    plain = encoder(0.0)
    ((operators, (inputs, outputs)),) = forward_of(plain)
    assert [operator.name for operator in operators] == ["scores", "scaled_scores", "attention", "context"]
    assert (inputs, outputs) == (("query", "key", "value"), ("context", "attention_logsumexp"))
    (_, (read, made), again) = backward_of(plain)[0]
    assert read == ("grad_context", "query", "key", "value", "context", "attention_logsumexp")
    assert made == ("grad_query", "grad_key", "grad_value")
    assert [operator.name for operator in again] == ["scores", "scaled_scores", "attention"]
    for other in (encoder(0.1), encoder(0.0, attention_mask=True)):
        assert forward_of(other) == []
        assert found(other, "torch_flash_attention") == found(other, "torch_flash_attention_grad") == []


def test_attention_with_a_causal_mask_is_a_cover_of_its_own() -> None:
    causal = decoder(0.0)
    ((operators, (inputs, outputs)),) = forward_of(causal, CAUSAL_FORWARD)
    assert [o.name for o in operators] == ["scores", "scaled_scores", "masked_scores", "attention", "context"]
    assert (inputs, outputs) == (("query", "key", "value"), ("context", "attention_logsumexp"))
    (_, (read, made), again) = backward_of(causal, CAUSAL_FORWARD)[0]
    assert read == ("grad_context", "query", "key", "value", "context", "attention_logsumexp")
    assert made == ("grad_query", "grad_key", "grad_value")
    assert [operator.name for operator in again] == ["scores", "scaled_scores", "masked_scores", "attention"]
    assert forward_of(causal) == forward_of(decoder(0.1), CAUSAL_FORWARD) == []
    assert forward_of(encoder(0.0), CAUSAL_FORWARD) == []


DROPPED = (*FORWARD[:-1], *DROPPING, FORWARD[-1])


def test_attention_with_dropped_weights_is_a_cover_that_leaves_its_mask_for_backward() -> None:
    layer = encoder(0.1)
    ((operators, (inputs, outputs)),) = forward_of(layer, DROPPED)
    assert [o.name for o in operators] == [
        "scores", "scaled_scores", "attention", "attention_dropout_mask", "attention_dropped", "context",
    ]  # fmt: skip
    assert inputs == ("query", "key", "value")
    assert outputs == ("context", "attention_logsumexp", "attention_dropout_mask")
    (members, (read, made), again) = backward_of(layer, DROPPED)[0]
    assert [o.name for o in members] == [
        "grad_attention_dropped", "grad_value", "grad_attention", "grad_scaled_scores", "grad_scores", "grad_query",
        "grad_key",
    ]  # fmt: skip
    assert read == ("grad_context", "query", "key", "value", "context", "attention_logsumexp", "attention_dropout_mask")
    assert made == ("grad_query", "grad_key", "grad_value")
    assert [o.name for o in again] == ["scores", "scaled_scores", "attention", "attention_dropped"]
    assert forward_of(encoder(0.0), DROPPED) == []


def test_causal_attention_with_dropped_weights_is_a_cover_too() -> None:
    kinds = (*CAUSAL_FORWARD[:-1], *DROPPING, CAUSAL_FORWARD[-1])
    ((operators, _),) = forward_of(decoder(0.1), kinds)
    assert [o.kind for o in operators] == list(kinds)
    assert len(backward_of(decoder(0.1), kinds)) == 1
    for kernel in LIBRARY:
        for layer in (encoder(0.1), encoder(0.0), decoder(0.1), decoder(0.0)):
            assert len(found(layer, kernel)) == len(found(layer, f"{kernel}_grad")) == 1


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_mask_that_is_added_to_the_scores_is_read_again_in_backward(p: float) -> None:
    kinds = (*MASKED_FORWARD[:-1], *(DROPPING if p else ()), MASKED_FORWARD[-1])
    layer = encoder(p, attention_mask=True)
    ((operators, (inputs, outputs)),) = forward_of(layer, kinds)
    assert [o.kind for o in operators] == list(kinds)
    assert inputs == ("query", "key", "value", "attention_mask")
    assert outputs[:2] == ("context", "attention_logsumexp")
    (_, (read, made), again) = backward_of(layer, kinds)[0]
    assert read == ("grad_context", "query", "key", "value", *outputs, "attention_mask")
    assert made == ("grad_query", "grad_key", "grad_value")
    assert [o.name for o in again][:4] == ["scores", "scaled_scores", "masked_scores", "attention"]
    assert forward_of(encoder(p), kinds) == []
    covered = {kernel: len(found(layer, kernel)) for name in LIBRARY for kernel in (name, f"{name}_grad")}
    assert covered == {kernel: int("efficient" in kernel) for kernel in covered}


def test_a_causal_mask_that_hides_queries_from_keys_is_no_causal_attention() -> None:
    causal = decoder(0.0)
    turned = (("key_axis", "q"), ("query_axis", "k"))
    operators = tuple(replace(o, attributes=turned) if o.kind == "causal_mask" else o for o in causal.operators)
    assert forward_of(replace(causal, operators=operators), CAUSAL_FORWARD) == []


def test_attention_needs_both_of_its_kernels() -> None:
    layer = encoder(0.0)
    assert covers(layer, ["torch_flash_attention"]) == ()
    assert len(covers(layer, ["torch_flash_attention", "torch_flash_attention_grad"])) == 2


def test_without_backward_attention_leaves_no_statistic() -> None:
    forward = load_model("bert-encoder").instantiate(None, ODD, dict.fromkeys(SITES, 0.0)).graph()
    ((_, (_, outputs)),) = forward_of(forward)
    assert outputs == ("context",)
    assert backward_of(forward) == []


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("model", [encoder, decoder, partial(encoder, attention_mask=True)])
def test_no_three_covers_of_the_layer_depend_on_each_other_in_a_circle(
    model: Callable[[float], Graph], p: float
) -> None:
    # The problem forbids two covers that need each other; a circle of three, none of whose pairs is one, it would miss.
    layer = model(p)
    named = {operator.name: operator for operator in layer.operators}
    wide = list({cover.operators: cover for cover in covers(layer, ALL) if len(cover.operators) > 1})
    reach = Reach(layer)
    bits = {names: reach.bits(named[name] for name in names) for names in wide}
    after = dict.fromkeys(wide, 0)
    for names in wide:
        for name in names:
            after[names] |= reach.after[reach.index[name]]
    ahead = {
        (one, other) for one, other in permutations(wide, 2) if not bits[one] & bits[other] and after[one] & bits[other]
    }
    pairs = {(one, other) for one, other in ahead if (other, one) in ahead}
    circles = [
        three for three in combinations(wide, 3)
        for turn in (three, three[::-1])
        if all((turn[i], turn[(i + 1) % 3]) in ahead - pairs for i in range(3))
    ]  # fmt: skip
    assert len(wide) > 30
    assert circles == []


def attention(
    query: str, key: str, scores: str, value: str, out: str, *, k: int = 5, p: int = 4, v: int = 4,
    dtype: str = "float32",
) -> Graph:  # fmt: skip
    """Return scores, scale, softmax over `k` and context of inputs with these axes; `v` is a feature of values."""
    rest = scores.replace("k", "")
    extents = {"b": 2, "n": 3, "r": 2, "q": 5, "k": k, "p": p, "v": v}
    tensors = {
        name: Tensor(name, axes, dtype, "input" if name in ("query", "key", "value") else "activation")
        for name, axes in {
            "query": query, "key": key, "value": value, "scores": scores, "scaled": scores, "weights": scores,
            "sums": rest, "out": out,
        }.items()
    }  # fmt: skip
    tensors["sums"] = replace(tensors["sums"], dtype="float32", role="auxiliary", optional=True)
    operators = (
        Operator("scores", "contraction", f"{query},{key}->{scores}", ("query", "key"), ("scores",)),
        Operator("scaled", "scale", f"{scores}->{scores}", ("scores",), ("scaled",), (("factor", 0.5),)),
        Operator(
            "weights", "softmax", f"{scores}->{scores},{rest}", ("scaled",), ("weights", "sums"), (("axis", "k"),)
        ),
        Operator("out", "contraction", f"{scores},{value}->{out}", ("weights", "value"), ("out",)),
    )
    return Graph("made up", extents, tensors, operators, ("out",))


@pytest.mark.parametrize(
    ("axes", "forward", "backward"),
    [
        (("bqnp", "bknp", "bnqk", "bknv", "bqnv"), 1, 1),
        (("bnqp", "bnkp", "bnqk", "bnkv", "bnqv"), 1, 1),  # heads before rows
        (("qbnp", "kbnp", "bnqk", "kbnv", "qbnv"), 1, 1),  # rows before the batch
        (("bqnp", "bnkp", "bnqk", "kbnv", "bnqv"), 1, 1),  # each in an order of its own
        (("bqnp", "bkp", "bnqk", "bkv", "bqnv"), 1, 1),  # one key for all heads
        (("bqnp", "bkp", "bnqk", "bknv", "bqnv"), 0, 0),  # one key for all heads, and a value for each
        (("bqnp", "bknp", "bnqk", "bkv", "bqnv"), 0, 0),
        (("bqnp", "knp", "bnqk", "knv", "bqnv"), 0, 0),  # one key for the batch
        (("bqnp", "bknp", "nbqk", "bknv", "bqnv"), 0, 0),  # the log-sum-exp would lie otherwise
        (("bqp", "bkp", "bqk", "bkv", "bqv"), 0, 0),  # no heads
        (("bqnrp", "bknp", "bnrqk", "bknv", "bqnrv"), 1, 1),  # one key for two heads
        (("bnrqp", "bnkp", "bnrqk", "bnkv", "bnrqv"), 1, 1),
        (("bqrnp", "bknp", "bnrqk", "bknv", "bqrnv"), 0, 0),  # heads that share a key lie apart
        (("bqnrp", "bknp", "bnrqk", "bknv", "bqrnv"), 0, 0),
        (("bqnrp", "bknp", "brnqk", "bknv", "bqnrv"), 0, 0),  # the log-sum-exp would lie otherwise
        (("bqnrp", "bknrp", "bnrqk", "bknrv", "bqnrv"), 0, 0),  # three axes of a batch
    ],
)
def test_attention_is_taken_as_one_where_it_runs_over_batch_and_heads(
    axes: tuple[str, str, str, str, str], forward: int, backward: int
) -> None:
    layer = training_graph(attention(*axes))
    assert (len(forward_of(layer)), len(backward_of(layer))) == (forward, backward)


def test_rows_of_grouped_heads_are_those_that_a_causal_mask_names() -> None:
    grouped = training_graph(load_model("llama-block").instantiate(None, GROUPED, {}).graph())
    ((_, (inputs, outputs)),) = forward_of(grouped, CAUSAL_FORWARD)
    assert (inputs, outputs) == (("query", "key", "value"), ("context", "attention_logsumexp"))
    assert len(backward_of(grouped, CAUSAL_FORWARD)) == 1
    turned = (("key_axis", "k"), ("query_axis", "r"))
    moved = tuple(replace(o, attributes=turned) if o.kind == "causal_mask" else o for o in grouped.operators)
    assert forward_of(replace(grouped, operators=moved), CAUSAL_FORWARD) == []


def t5(p: float, read: str = "") -> Graph:
    """Return T5's block; with the name of a gradient, which another operator reads as well."""
    block = training_graph(
        load_model("t5-block").instantiate(None, ODD | {"q": 5, "k": 5}, dict.fromkeys(SITES, p)).graph()
    )
    if not read:
        return block
    axes = block.tensors[read].axes
    reading = Operator("reading", "relu", f"{axes}->{axes}", (read,), ("seen",), (), "backward")
    tensors = {**block.tensors, "seen": replace(block.tensors[read], name="seen")}
    return replace(block, tensors=tensors, operators=(*block.operators, reading))


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_bias_of_the_scores_gets_its_gradient_from_attention_as_one(p: float) -> None:
    kinds = ("contraction", "bias", "softmax", *(DROPPING if p else ()), "contraction")
    ((operators, (inputs, outputs)),) = forward_of(t5(p), kinds)
    assert [o.kind for o in operators] == list(kinds)
    assert inputs == ("query", "key", "value", "position_bias")
    (members, (read, made), _) = backward_of(t5(p), kinds)[0]
    assert read == ("grad_context", "query", "key", "value", *outputs, "position_bias")
    assert made == ("grad_query", "grad_key", "grad_value", "grad_position_bias")
    assert members[-1].kind == "bias_grad"
    assert forward_of(t5(p), FORWARD) == forward_of(t5(p), BIASED_FORWARD) == []
    assert forward_of(t5(p), tuple("mask" if kind == "bias" else kind for kind in kinds)) == []
    assert backward_of(t5(p, read="grad_biased_scores"), kinds) == []
    frozen = attention_grad(kinds, frozen=("bias",))
    assert list(matching.attention_grad(t5(p), frozen)) == []
    without = [o for o in t5(p).operators if o.kind != "bias_grad"]
    left = tuple(name for name in t5(p).outputs if name != "grad_position_bias")
    constant = replace(t5(p), operators=tuple(without), outputs=left)
    ((_, (_, made), _),) = matching.attention_grad(constant, frozen)
    assert made == ("grad_query", "grad_key", "grad_value")


def test_sinks_that_are_frozen_get_no_gradient() -> None:
    trained = adding("mask+sinks", "bqk", "bqnrp")
    kinds = ("contraction", "mask", "sink_softmax", "contraction")
    ((operators, (inputs, _)),) = forward_of(trained, kinds)
    assert [o.kind for o in operators] == list(kinds)
    assert inputs == ("query", "key", "value", "mask", "sinks")
    assert forward_of(trained, tuple("softmax" if kind == "sink_softmax" else kind for kind in kinds)) == []
    ((_, (read, made), again),) = backward_of(trained, kinds)
    assert (read[-2:], made[-1]) == (("mask", "sinks"), "grad_sinks")
    assert [o.kind for o in again] == list(kinds[:-1])
    frozen = attention_grad(kinds, frozen=("sink_softmax",))
    assert list(matching.attention_grad(trained, frozen)) == []
    left = tuple(name for name in trained.outputs if name != "grad_sinks")
    constant = replace(trained, operators=tuple(o for o in trained.operators if o.kind != "sink_grad"), outputs=left)
    ((_, (_, made), _),) = matching.attention_grad(constant, frozen)
    assert made == ("grad_query", "grad_key", "grad_value")


def test_sinks_of_anything_but_heads_are_left_to_other_kernels() -> None:
    of_heads = adding("sinks", "", "bqnp")
    weigh = next(o for o in of_heads.operators if o.kind == "sink_softmax")
    of_batches = replace(weigh, spec=weigh.spec.replace(",n->", ",b->"))
    tensors = {**of_heads.tensors, "sinks": replace(of_heads.tensors["sinks"], axes="b")}
    changed = tuple(of_batches if o is weigh else o for o in of_heads.operators if o.phase == "forward")
    kinds = ("contraction", "sink_softmax", "contraction")
    assert len(forward_of(of_heads, kinds)) == 1
    assert forward_of(replace(of_heads, operators=changed, tensors=tensors, outputs=("out",)), kinds) == []


def test_attention_with_values_of_another_width_than_queries_is_not_taken_as_one() -> None:
    assert forward_of(training_graph(attention("bqnp", "bknp", "bnqk", "bknv", "bqnv", v=8))) == []


LARGE = {"b": 4, "l": 256, "h": 64, "g": 2, "r": 1, "p": 32, "f": 1024}


def test_what_backward_can_make_of_what_it_reads_anyway_need_not_be_left() -> None:
    of = training_graph(load_model("llama-block").instantiate(None, LARGE).graph())
    sets = {(cover.operators, cover.outputs) for cover in found(of, "inductor")}
    assert {(("activation", "gated"), made) for made in (("activation", "gated"), ("gated",))} <= sets
    small = training_graph(load_model("llama-block").instantiate(None, LARGE | {"f": 64}).graph())
    assert (("activation", "gated"), ("gated",)) not in {(c.operators, c.outputs) for c in found(small, "inductor")}
    assert not [
        c for c in covers(of, ALL, repeats=False) if (c.operators, c.outputs) == (("activation", "gated"), ("gated",))
    ]
