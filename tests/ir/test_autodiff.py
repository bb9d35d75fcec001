"""What the training graph looks like. That its numbers are right is shown with the reference kernels."""

import pytest

from autotuner.errors import GraphError
from autotuner.ir.autodiff import derived_from, training_graph
from autotuner.ir.graph import Graph, Operator, Tensor
from autotuner.ir.models import load_model


def chain(
    *operators: Operator, outputs: tuple[str, ...] = ("y",), constants: tuple[str, ...] = (), **axes: str
) -> Graph:
    """Return a forward graph; a tensor is an input if named x or among the constants, a parameter if named w."""
    roles = {"x": "input", "w": "parameter"} | dict.fromkeys(constants, "input")
    tensors = {
        name: Tensor(name, letters, "float32", roles.get(name, "activation"), constant=name in constants)  # type: ignore[arg-type]
        for name, letters in axes.items()
    }
    return Graph("chain", dict.fromkeys("abcd", 2), tensors, operators, outputs)


def encoder(**options: float | str | bool) -> Graph:
    return training_graph(load_model("bert-encoder").instantiate("tiny", options=options).graph())


def test_a_contraction_has_a_contraction_per_gradient() -> None:
    graph = training_graph(chain(Operator("y", "contraction", "ab,cb->ac", ("x", "w"), ("y",)), x="ab", w="cb", y="ac"))
    found = [(o.name, o.spec, o.inputs) for o in graph.operators if o.phase == "backward"]
    assert found == [("grad_x", "ac,cb->ab", ("grad_y", "w")), ("grad_w", "ac,ab->cb", ("grad_y", "x"))]
    assert graph.outputs == ("y", "grad_x", "grad_w")
    assert graph.given_gradients == ("grad_y",)
    assert graph.saved == ("x", "w")


def frozen(*constants: str) -> Graph:
    """Return the forward graph of two products and a bias, with some of what is given constant."""
    return chain(
        Operator("scaled", "scale", "ab->ab", ("x",), ("scaled",), (("factor", 2.0),)),
        Operator("product", "contraction", "ab,cb->ac", ("scaled", "w"), ("product",)),
        Operator("again", "contraction", "ac,dc->ad", ("product", "weight"), ("again",)),
        Operator("y", "bias", "ad,d->ad", ("again", "offset"), ("y",)),
        constants=constants,
        x="ab", w="cb", scaled="ab", product="ac", weight="dc", again="ad", offset="d", y="ad",
    )  # fmt: skip


def test_nothing_is_derived_for_constants_and_for_what_is_made_of_them_alone() -> None:
    graph = training_graph(frozen("x", "weight", "offset"))
    assert [(o.name, o.inputs) for o in graph.operators if o.phase == "backward"] == [
        ("grad_product", ("grad_y", "weight")),
        ("grad_w", ("grad_product", "scaled")),
    ]
    assert graph.outputs == ("y", "grad_w")


def test_an_output_of_constants_alone_is_refused() -> None:
    with pytest.raises(GraphError, match="output 'y' depends on tensors without gradient only"):
        training_graph(frozen("x", "w", "weight", "offset"))


def test_a_constant_beside_a_parameter_gets_its_gradient_from_the_operator_that_makes_both() -> None:
    attributes = (("epsilon", 1e-5),)
    norm = Operator("y", "layer_norm", "ab,b,b->ab,a,a", ("x", "scale", "w"), ("y", "mean", "deviation"), attributes)
    graph = training_graph(
        chain(norm, constants=("x", "scale"), x="ab", scale="b", w="b", y="ab", mean="a", deviation="a")
    )
    assert [o.kind for o in graph.operators if o.phase == "backward"] == ["layer_norm_grad_parameters"]
    assert graph.outputs == ("y", "grad_scale", "grad_w")


def test_no_operator_stands_for_a_gradient_that_is_handed_on() -> None:
    graph = encoder()
    assert "grad_query_projection" not in graph.tensors
    assert (
        graph.producers["grad_query_bias"].inputs == graph.producers["grad_query_weight"].inputs[:1] == ("grad_query",)
    )


def test_each_product_is_added_to_the_running_sum_right_away() -> None:
    graph = encoder()
    names = [o.name for o in graph.operators]
    first = names.index("grad_x_from_value_projection")
    assert names[first : first + 6] == [
        "grad_x_from_value_projection",
        "grad_x_sum_1",
        "grad_x_from_key_projection",
        "grad_x_sum_2",
        "grad_x_from_query_projection",
        "grad_x",
    ]
    assert graph.producers["grad_x_sum_1"].inputs == ("grad_residual1", "grad_x_from_value_projection")
    assert graph.producers["grad_x"].inputs == ("grad_x_sum_2", "grad_x_from_query_projection")


def test_a_product_waits_for_the_terms_that_are_no_products() -> None:
    graph = training_graph(
        chain(
            Operator("u", "relu", "ab->ab", ("x",), ("u",)),
            Operator("y", "contraction", "ab,cb->ac", ("x", "w"), ("y",)),
            outputs=("u", "y"),
            x="ab", w="cb", u="ab", y="ac",
        )
    )  # fmt: skip
    names = [o.name for o in graph.operators if o.phase == "backward"]
    assert names[-3:] == ["grad_x_from_u", "grad_x_from_y", "grad_x"]
    assert graph.producers["grad_x"].inputs == ("grad_x_from_u", "grad_x_from_y")


def test_each_backward_operator_but_sums_and_copies_is_derived_from_a_forward_operator() -> None:
    forward = load_model("bert-encoder").instantiate("tiny").graph()
    origins = derived_from(forward)
    names = {operator.name: operator for operator in forward.operators}
    backward = [each for each in training_graph(forward).operators if each.phase == "backward"]
    assert [each.kind for each in backward if each.name not in origins] == ["add"] * 4
    assert set(origins.values()) <= set(names)
    assert {operator.name for operator in backward} > set(origins)
    for each in backward:
        if each.name in origins:
            of = names[origins[each.name]]
            made = {name.removeprefix("grad_").partition("_from_")[0] for name in each.outputs}
            assert made <= set(of.inputs)
    assert origins["grad_query"] == origins["grad_key"] == "scores"


def test_an_input_never_shares_its_gradient_with_another_tensor() -> None:
    graph = training_graph(chain(Operator("y", "bias", "ab,b->ab", ("x", "w"), ("y",)), x="ab", w="b", y="ab"))
    assert graph.outputs == ("y", "grad_x", "grad_w")
    copy = graph.producers["grad_x"]
    assert (copy.kind, copy.inputs, copy.attributes) == ("scale", ("grad_y",), (("factor", 1.0),))


def test_an_output_that_is_read_again_gets_its_sum_under_another_name() -> None:
    graph = training_graph(
        chain(
            Operator("u", "relu", "ab->ab", ("x",), ("u",)),
            Operator("y", "relu", "ab->ab", ("u",), ("y",)),
            outputs=("u", "y"),
            x="ab", u="ab", y="ab",
        )
    )  # fmt: skip
    assert graph.given_gradients == ("grad_u", "grad_y")
    assert graph.producers["grad_u_sum"].inputs == ("grad_u", "grad_u_from_y")
    assert graph.producers["grad_x"].inputs == ("grad_u_sum", "u")


def test_backward_reads_the_mask_and_statistics_of_forward() -> None:
    graph = encoder(attention_mask=True)
    assert {"attention_dropout_mask", "norm1_mean", "y_reciprocal_deviation", "linear1_biased"} <= set(graph.saved)
    assert graph.tensors["attention_logsumexp"].optional
    assert "attention_logsumexp" in graph.producers["grad_masked_scores"].inputs
    assert "grad_attention_mask" not in graph.tensors


def test_a_causal_mask_hands_its_gradient_on() -> None:
    masked = Operator("y", "causal_mask", "ab->ab", ("u",), ("y",), (("query_axis", "a"), ("key_axis", "b")))
    graph = training_graph(
        chain(Operator("u", "contraction", "ac,bc->ab", ("x", "w"), ("u",)), masked, x="ac", w="bc", u="ab", y="ab")
    )
    assert [(o.name, o.inputs) for o in graph.operators if o.phase == "backward"] == [
        ("grad_x", ("grad_y", "w")),
        ("grad_w", ("grad_y", "x")),
    ]


def test_relu_saves_its_output_and_gelu_its_input() -> None:
    assert encoder(activation="relu").producers["grad_linear1_biased"].inputs[1] == "activation"
    assert encoder(activation="gelu_tanh").producers["grad_linear1_biased"].inputs[1] == "linear1_biased"


def test_gradients_have_the_axes_and_dtype_of_their_tensors() -> None:
    graph = training_graph(load_model("bert-encoder").instantiate("tiny", dtype="bfloat16").graph())
    for name, tensor in graph.tensors.items():
        if tensor.role == "gradient" and name.removeprefix("grad_") in graph.tensors:
            primal = graph.tensors[name.removeprefix("grad_")]
            assert (tensor.axes, tensor.dtype) == (primal.axes, primal.dtype)
    assert graph.tensors["grad_x_sum_1"].axes == "blh"
    assert graph.tensors["norm1_mean"].dtype == "float32"


def test_renaming_axes_tensors_and_operators_changes_no_signature() -> None:
    def softmax(prefix: str, a: str, b: str) -> Graph:
        tensors = {f"{prefix}x": Tensor(f"{prefix}x", a + b, "float32", "input")}
        made = (f"{prefix}y", f"{prefix}sums")
        tensors[made[0]] = Tensor(made[0], a + b, "float32", "activation")
        tensors[made[1]] = Tensor(made[1], a, "float32", "auxiliary", optional=True)
        spec = f"{a}{b}->{a}{b},{a}"
        operator = Operator(f"{prefix}op", "softmax", spec, (f"{prefix}x",), made, (("axis", b),))
        return training_graph(Graph(prefix, {a: 3, b: 5}, tensors, (operator,), made[:1]))

    assert softmax("one", "q", "k").key == softmax("two", "s", "a").key
    first, second = softmax("one", "q", "k"), softmax("two", "s", "a")
    for one, two in zip(first.operators, second.operators, strict=True):
        assert (
            first.subgraph([one], one.inputs, one.outputs).signature
            == second.subgraph([two], two.inputs, two.outputs).signature
        )


def test_axes_that_a_causal_mask_names_are_renamed_with_its_spec() -> None:
    def causal(a: str, b: str, query: str, key: str) -> Graph:
        tensors = {name: Tensor(name, a + b, "float32", "input" if name == "x" else "activation") for name in "xy"}
        attributes = (("key_axis", key), ("query_axis", query))
        operator = Operator("y", "causal_mask", f"{a}{b}->{a}{b}", ("x",), ("y",), attributes)
        return Graph("causal", {a: 3, b: 3}, tensors, (operator,), ("y",))

    assert causal("q", "k", query="q", key="k").key == causal("k", "z", query="k", key="z").key
    assert causal("q", "k", query="q", key="k").key != causal("q", "k", query="k", key="q").key


def test_another_extent_is_another_signature() -> None:
    model = load_model("bert-encoder")
    tiny, longer = (training_graph(model.instantiate("tiny", {"l": extent}).graph()) for extent in (64, 65))
    assert tiny.key != longer.key


def test_a_kind_without_rule_is_named_with_those_that_have_one() -> None:
    graph = chain(Operator("y", "bias_grad", "ab->b", ("x",), ("y",)), x="ab", y="b")
    with pytest.raises(
        GraphError, match="operator 'y': kind 'bias_grad' has no backward rule; known: contraction, bias"
    ):
        training_graph(graph)


def test_a_parameter_that_no_gradient_reaches_is_named() -> None:
    graph = chain(Operator("y", "relu", "ab->ab", ("x",), ("y",)), x="ab", w="b", y="ab")
    with pytest.raises(GraphError, match=r"parameter 'w' reaches none of the outputs \['y'\]"):
        training_graph(graph)


def test_a_gradient_that_arrives_at_a_statistic_is_refused() -> None:
    softmax = Operator("y", "softmax", "ab->ab,a", ("x",), ("y", "sums"), (("axis", "b"),))
    graph = chain(softmax, outputs=("y", "sums"), x="ab", y="ab", sums="a")
    with pytest.raises(GraphError, match="arrives at 'sums', but only its first output, 'y', has a gradient"):
        training_graph(graph)


def test_a_gradient_that_arrives_at_a_drawn_mask_is_refused() -> None:
    graph = chain(Operator("y", "dropout_mask", "->ab", (), ("y",), (("p", 0.5),)), y="ab")
    with pytest.raises(GraphError, match="a draw has no gradient"):
        training_graph(graph)
