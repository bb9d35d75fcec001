import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotuner.errors import ConfigurationError
from autotuner.runtime import TunedModule, TunedWarning, apply, describe
from autotuner.runtime.framework import encoder_layer
from tests.runtime.layers import assert_equal, batch, gradients, tuned_layer
from tests.runtime.plans import MASKED, TINY, WITH_DROPOUT, configuration, model

PADDING = torch.arange(TINY["l"]) >= torch.tensor([[4], [6]])


def original_runs(layer: TunedModule, twin: nn.Module, key: str, x: Tensor, **arguments: Any) -> None:
    """Assert that two calls equal the twin's, warn once, and are counted by their reason."""
    before = layer.calls
    with pytest.warns(TunedWarning) as warned:
        found = [layer(x, **arguments) for _ in range(2)]
    wanted = twin(x, **arguments)
    for y in found:
        torch.testing.assert_close(y, wanted, equal_nan=True)
    told = [w for w in warned if w.category is TunedWarning]
    assert [(str(w.message)[:12], w.filename) for w in told] == [("the original", __file__)]
    assert layer.fallbacks == {key: 2}
    assert layer.calls == before


@pytest.mark.slow
def test_another_shape_runs_the_original() -> None:
    layer, twin = tuned_layer()
    original_runs(layer, twin, "shape", torch.randn(2, 5, 8, dtype=torch.float64))


def test_one_sequence_without_a_batch_runs_the_original() -> None:
    layer, twin = tuned_layer()
    original_runs(layer, twin, "shape", torch.randn(6, 8, dtype=torch.float64))


def test_a_padding_mask_that_it_was_not_tuned_for_runs_the_original() -> None:
    layer, twin = tuned_layer()
    original_runs(layer, twin, "mask", batch(), src_key_padding_mask=PADDING)


def test_a_mask_between_positions_runs_the_original() -> None:
    layer, twin = tuned_layer()
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    original_runs(layer, twin, "src_mask", batch(), src_mask=causal, is_causal=True)


@pytest.mark.slow
def test_dropout_in_eval_mode_runs_the_original() -> None:
    layer, twin = tuned_layer(model(p=WITH_DROPOUT))
    original_runs(layer.eval(), twin.eval(), "settings", batch())
    layer.train()(batch())
    assert layer.calls == 1


@pytest.mark.slow
def test_a_changed_dropout_probability_runs_the_original() -> None:
    layer, twin = tuned_layer(model(p=WITH_DROPOUT))
    for module in (layer, twin):
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        module.self_attn.dropout = 0.0  # type: ignore[union-attr]
    original_runs(layer, twin, "settings", batch())


@pytest.mark.slow
def test_autocast_runs_the_original() -> None:
    layer, twin = tuned_layer(model(dtype="float32"))
    with torch.autocast("cpu", torch.bfloat16):
        original_runs(layer, twin, "autocast", batch(dtype=torch.float32))


def test_a_hook_on_a_submodule_runs_the_original_and_is_called() -> None:
    layer, twin = tuned_layer()
    called = []
    handle = layer.get_submodule("linear1").register_forward_hook(lambda *_: called.append(1))
    original_runs(layer, twin, "hooks", batch())
    assert len(called) == 2
    handle.remove()
    layer(batch())
    assert layer.calls == 1


def test_a_module_of_another_dtype_runs_the_original() -> None:
    layer, twin = tuned_layer()
    original_runs(layer.float(), twin.float(), "dtype", batch(dtype=torch.float32))
    layer.double()
    layer(batch())
    assert layer.calls == 1


def test_a_replaced_submodule_that_computes_something_else_runs_the_original() -> None:
    layer, twin = tuned_layer()

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    for module in (layer, twin):
        torch.manual_seed(0)
        module.linear1 = Doubled(8, 12, dtype=torch.float64)
    original_runs(layer, twin, "parts", batch())


@pytest.mark.slow
def test_a_replaced_submodule_of_the_same_kind_runs_tuned() -> None:
    layer, twin = tuned_layer(seed=1)
    for module in (layer, twin):
        torch.manual_seed(0)
        module.linear1 = nn.Linear(8, 12, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunedWarning)
        assert_equal(gradients(layer, batch()), gradients(twin, batch()))
    assert layer.calls == 1


def test_parameters_swapped_for_a_call_are_those_that_run() -> None:
    layer, twin = tuned_layer()
    for factor in range(6):
        state = {name: value * (factor + 1) for name, value in twin.state_dict().items()}
        found = torch.func.functional_call(layer, state, batch())
        torch.testing.assert_close(found, torch.func.functional_call(twin, state, batch()), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(layer(batch()), twin(batch()), rtol=1e-10, atol=1e-10)
    assert not layer.fallbacks


def test_a_transformed_call_runs_the_original() -> None:
    layer, twin = tuned_layer()
    with pytest.warns(TunedWarning):
        found = torch.func.grad(lambda x: layer(x).square().sum())(batch())
    torch.testing.assert_close(found, torch.func.grad(lambda x: twin(x).square().sum())(batch()))
    assert layer.fallbacks == {"tracing": 1}


@pytest.mark.parametrize(
    "mask",
    [
        lambda: PADDING,
        lambda: torch.zeros(2, 6, dtype=torch.float64).masked_fill_(PADDING, -torch.inf),
        lambda: torch.linspace(-2, 1, 12, dtype=torch.float64).view(2, 6),
    ],
    ids=["boolean", "infinite", "finite"],
)
@pytest.mark.slow
def test_a_mask_over_keys_that_it_was_tuned_for_runs_tuned(mask: Callable[[], Tensor]) -> None:
    layer, twin = tuned_layer(MASKED)
    found = gradients(layer, batch(), src_key_padding_mask=mask())
    assert_equal(found, gradients(twin, batch(), src_key_padding_mask=mask()))
    assert_equal(gradients(layer, batch()), gradients(twin, batch()))
    assert (layer.calls, dict(layer.fallbacks)) == (2, {})


@pytest.mark.parametrize(
    "mask",
    [lambda padding: padding, lambda padding: torch.zeros(2, 6, dtype=torch.float64).masked_fill_(padding, -torch.inf)],
    ids=["boolean", "infinite"],
)
def test_a_batch_with_an_example_that_is_all_padding_runs_the_original(mask: Callable[[Tensor], Tensor]) -> None:
    layer, twin = tuned_layer(MASKED)
    padding = PADDING.clone()
    padding[0] = True
    original_runs(layer, twin, "padding", batch(), src_key_padding_mask=mask(padding))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"dim_feedforward": 16}, "extent f is 16, the configuration's 12"),
        ({"nhead": 4}, "extent n is 4, the configuration's 2"),
        ({"activation": "relu"}, "activation is 'relu', the configuration's 'gelu_erf'"),
        ({"dropout": 0.5}, "attention_dropout is 0.5, the configuration's 0.0"),
        ({"layer_norm_eps": 1e-6}, "epsilon is 1e-06, the configuration's 1e-05"),
        ({"dtype": torch.float32}, "dtype is 'float32', the configuration's 'float64'"),
        ({"norm_first": True}, "model is 'gpt-block', the configuration's 'bert-encoder'"),
        ({"bias": False}, "has every bias"),
        ({"activation": nn.SiLU()}, "activation SiLU"),
    ],
)
def test_a_layer_of_another_structure_is_refused_in_a_sentence(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.0, "activation": "gelu", "batch_first": True,
        "dtype": torch.float64,
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match=words):
        apply(nn.TransformerEncoderLayer(**arguments | change), configuration(model()))


def test_a_module_of_another_class_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ConfigurationError, match="TransformerEncoderLayer"):
        apply(nn.Linear(2, 2), configuration(model()))


def test_a_layer_is_described_as_the_model_that_it_is() -> None:
    of = model(p=0.25, activation="gelu_tanh")
    found = describe(encoder_layer(of))
    assert found.model == "bert-encoder"
    assert found.extents == {"h": 8, "n": 2, "p": 4, "f": 12}
    assert found.options == {name: value for name, value in of.options.items() if name != "attention_mask"}
    assert found.dtype == "float64"


def test_a_layer_tuned_with_a_mask_trains_without_one_behind_a_call_in_inference_mode() -> None:
    layer, twin = tuned_layer(MASKED)
    with torch.inference_mode():
        torch.testing.assert_close(layer(batch()), twin(batch()), rtol=1e-10, atol=1e-10)
    assert_equal(gradients(layer, batch()), gradients(twin, batch()), 1e-10)
    assert (layer.calls, dict(layer.fallbacks)) == (2, {})
