import json
from typing import Any

import pytest

from autotuner.errors import ModelError
from autotuner.ir.models import Model, load_model, named_model
from autotuner.ir.records import canonical_json

BERT = load_model("bert-encoder")


def test_presets_have_the_extents_of_the_reference_case() -> None:
    assert BERT.instantiate("large").extents == {"b": 8, "l": 512, "h": 1024, "n": 16, "p": 64, "f": 4096}
    assert BERT.instantiate("large-short").extents == {"b": 96, "l": 128, "h": 1024, "n": 16, "p": 64, "f": 4096}
    assert BERT.instantiate("base").extents == {"b": 8, "l": 128, "h": 768, "n": 12, "p": 64, "f": 3072}
    assert BERT.instantiate("tiny").extents == {"b": 4, "l": 64, "h": 128, "n": 4, "p": 32, "f": 512}


def test_an_extent_overrides_its_preset() -> None:
    graph = BERT.instantiate("tiny", {"l": 7}).graph()
    assert graph.shape("scores") == (4, 4, 7, 7)
    assert graph.name == "bert-encoder:tiny"


def test_one_tensor_is_read_with_other_letters_by_each_operator() -> None:
    graph = BERT.instantiate("tiny").graph()
    assert graph.tensors["key"].axes == "blnp"
    assert dict(graph.producers["scores"].operands)["key"] == "bknp"
    assert (graph.extents["q"], graph.extents["k"]) == (64, 64)


def test_a_dropout_site_with_p_0_vanishes() -> None:
    full, partly = BERT.instantiate("tiny").graph(), BERT.instantiate("tiny", options={"output_dropout": 0}).graph()
    gone = {o.name for o in full.operators} - {o.name for o in partly.operators}
    assert gone == {"output_dropout_mask", "output_dropped"}
    assert partly.producers["residual1"].inputs == ("output_biased", "x")
    assert "output_dropped" not in partly.tensors


def test_the_mask_is_there_only_when_asked_for() -> None:
    without, masked = (
        BERT.instantiate("tiny").graph(),
        BERT.instantiate("tiny", options={"attention_mask": True}).graph(),
    )
    assert "attention_mask" not in without.tensors
    assert without.producers["attention"].inputs == ("scaled_scores",)
    assert masked.producers["attention"].inputs == ("masked_scores",)
    assert masked.shape("attention_mask") == (4, 64)


def test_a_causal_mask_names_the_axes_of_queries_and_keys() -> None:
    masked = load_model("gpt-block").instantiate("tiny").graph().producers["masked_scores"]
    assert (masked.kind, masked.spec, masked.inputs) == ("causal_mask", "bnqk->bnqk", ("scaled_scores",))
    assert masked.attributes == (("key_axis", "k"), ("query_axis", "q"))


def test_options_choose_kinds_and_attributes() -> None:
    graph = BERT.instantiate("tiny", options={"activation": "relu", "epsilon": 1e-12, "attention_dropout": 0.2}).graph()
    assert graph.producers["activation"].kind == "relu"
    assert graph.producers["y"].attribute("epsilon") == 1e-12
    assert graph.producers["attention_dropped"].attribute("p") == 0.2
    assert graph.producers["scaled_scores"].attribute("factor") == pytest.approx(32**-0.5)


def test_statistics_are_kept_in_at_least_float32() -> None:
    half, double = (BERT.instantiate("tiny", dtype=dtype).graph().tensors for dtype in ("float16", "float64"))
    assert (half["y"].dtype, half["y_mean"].dtype, half["output_dropout_mask"].dtype) == (
        "float16",
        "float32",
        "float16",
    )
    assert double["y_mean"].dtype == double["attention_logsumexp"].dtype == "float64"
    assert half["y_mean"].role == half["output_dropout_mask"].role == "auxiliary"
    assert [name for name, tensor in half.items() if tensor.optional] == ["attention_logsumexp"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "huge"}, "no preset 'huge'; known: tiny, base, large, large-short"),
        ({"extents": {"b": 2}}, "axis without extent: l (position in the sequence), h (hidden)"),
        ({"preset": "tiny", "extents": {"l": 0}}, "axis 'l' has extent 0; it must be an integer above 0"),
        ({"preset": "tiny", "extents": {"l": 2.0}}, "axis 'l' has extent 2.0"),
        ({"preset": "tiny", "extents": {"l": True}}, "axis 'l' has extent True"),
        ({"preset": "tiny", "extents": {"q": 2}}, "no axis 'q'; known: b (batch), l (position in the sequence)"),
        ({"preset": "tiny", "options": {"dropout": 0.1}}, "no option 'dropout'; known: activation, attention_mask"),
        ({"preset": "tiny", "options": {"activation": "gelu"}}, "it must be one of gelu_erf, gelu_tanh, relu"),
        ({"preset": "tiny", "options": {"attention_mask": 1}}, "'attention_mask' is 1; it must be one of False, True"),
        ({"preset": "tiny", "options": {"output_dropout": 1.0}}, "is 1.0; it must be a number from 0 to below 1"),
        ({"preset": "tiny", "options": {"output_dropout": float("nan")}}, "it must be a number from 0 to below 1"),
        ({"preset": "tiny", "dtype": "int8"}, "no dtype 'int8'; known: float32, bfloat16, float16, float64"),
    ],
)
def test_a_choice_that_is_not_valid_says_what_is(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        BERT.instantiate(**arguments)
    assert message in str(caught.value)
    assert str(caught.value).startswith(BERT.origin)


def test_an_axis_without_extent_names_the_operator_that_needs_it() -> None:
    with pytest.raises(ModelError, match="operator 'linear1' is the first that needs one"):
        BERT.instantiate(None, {"b": 2, "l": 3, "h": 4, "n": 2, "p": 2})


def test_a_saved_model_is_self_contained() -> None:
    model = BERT.instantiate("tiny", {"l": 9}, {"activation": "relu", "attention_mask": True}, "bfloat16")
    text = canonical_json(model.to_json())
    again = Model.from_json(json.loads(text))
    assert again == model
    assert again.graph() == model.graph()
    assert canonical_json(again.to_json()) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": 1}, "a saved model has the keys name, preset"),
        ({"name": "other"}, "its definition is named 'bert-encoder'"),
        ({"extents": [1]}, "extents must be a mapping"),
        ({"extents": {}}, "axis without extent"),
        ({"dtype": ["float32"]}, "no dtype ['float32']"),
        ({"definition": {"version": 3}}, "saved model: version: Input should be 1"),
        ({"definition": []}, "saved model: Input should be a valid dictionary"),
    ],
)
def test_a_saved_model_that_was_changed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        Model.from_json({**BERT.instantiate("tiny").to_json(), **change})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("axes", "tokens"),
    [
        ({"b": "batch", "l": "position in the sequence", "h": "hidden"}, 6 * 8),
        ({"l": "position in the sequence", "b": "batch", "h": "hidden"}, 6 * 8),
        ({"b": "batch", "l": "patch", "h": "hidden"}, None),
        ({"b": "6 elements", "l": "8 elements", "h": "12 elements"}, None),
        ({"b": "batch", "l": "position in the sequence", "h": "position in the sequence"}, None),
    ],
)
def test_tokens_of_a_step_are_known_where_the_words_of_two_axes_say_so(
    axes: dict[str, str], tokens: int | None
) -> None:
    model = Model("made-up", None, {"b": 6, "l": 8, "h": 12}, {}, "float32", {"axes": axes})
    assert model.tokens == tokens


def test_shipped_models_of_text_know_their_tokens_and_one_of_pictures_has_none() -> None:
    assert named_model("bert-encoder:tiny").tokens == 4 * 64
    assert named_model("t5-block:tiny").tokens is not None
    assert named_model("vit-block:tiny").tokens is None
