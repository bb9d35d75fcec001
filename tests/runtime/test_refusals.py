"""Modules that cannot be tuned: refused in a sentence, the same before tuning as when a configuration is applied."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import autotuner
from autotuner.errors import AutotunerError, ConfigurationError, DeviceError
from autotuner.runtime import apply
from autotuner.runtime.framework import encoder_layer
from tests.runtime.bert_layers import bert_layer
from tests.runtime.plans import TINY, configuration, model

Change = Callable[[Any], Any]


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def replaced(path: str, part: Callable[[], nn.Module | None]) -> Change:
    """Return what puts another module in the place of a submodule."""

    def change(layer: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(layer.get_submodule(owner), name, part())

    return change


def pruned(path: str, name: str) -> Change:
    return lambda layer: prune.l1_unstructured(layer.get_submodule(path), name, 0.5)  # type: ignore[no-untyped-call]


def no_parameter(layer: Any) -> None:
    del layer.linear1.weight
    layer.linear1.weight = torch.ones(12, 8)


def old_weight_norm(layer: Any) -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        torch.nn.utils.weight_norm(layer.linear1)


def tied(layer: Any) -> None:
    layer.norm2.weight = layer.norm1.weight


ENCODER: list[tuple[str, Change, str]] = [
    (
        "RMSNorm",
        replaced("norm1", lambda: nn.RMSNorm(8)),
        "its norm1 is a torch.nn.modules.normalization.RMSNorm, and the model has a LayerNorm there",
    ),
    (
        "Sequential",
        replaced("linear1", lambda: nn.Sequential(nn.Linear(8, 12))),
        "its linear1 is a torch.nn.modules.container.Sequential, and the model has a Linear",
    ),
    (
        "Identity",
        replaced("dropout1", nn.Identity),
        "its dropout1 is a torch.nn.modules.linear.Identity, and the model has a Dropout",
    ),
    ("AlphaDropout", replaced("dropout", nn.AlphaDropout), "its dropout is a torch.nn.modules.dropout.AlphaDropout"),
    ("nothing", replaced("linear2", lambda: None), "its linear2 is missing"),
    ("own activation", replaced("activation", Doubled), "activation Doubled()"),
    (
        "no affine",
        replaced("norm1", lambda: nn.LayerNorm(8, elementwise_affine=False)),
        "it has no norm1.weight: the model has every bias and every weight",
    ),
    ("no bias", replaced("linear1", lambda: nn.Linear(8, 12, bias=False)), "it has no linear1.bias"),
    (
        "wide norm",
        replaced("norm2", lambda: nn.LayerNorm((6, 8))),
        "norm2.weight has shape (6, 8), and the model's is (8,)",
    ),
    (
        "narrow",
        replaced("linear2", lambda: nn.Linear(12, 4)),
        "linear2.weight has shape (4, 12), and the model's is (8, 12)",
    ),
    (
        "pruned",
        pruned("linear1", "weight"),
        "linear1.weight is computed from weight_orig before each call",
    ),
    (
        "pruned inside",
        pruned("self_attn", "in_proj_weight"),
        "self_attn.in_proj_weight is computed from in_proj_weight_orig",
    ),
    ("weight norm", old_weight_norm, "linear1.weight is computed from weight_g and weight_v before each call"),
    (
        "parametrized",
        lambda layer: parametrizations.weight_norm(layer.linear1),
        "its linear1 is a torch.nn.utils.parametrize.ParametrizedLinear, and the model has a Linear there; ",
    ),
    (
        "parametrized inside",
        lambda layer: parametrize.register_parametrization(layer.self_attn, "in_proj_weight", Doubled()),
        "its self_attn is a torch.nn.utils.parametrize.ParametrizedMultiheadAttention",
    ),
    (
        "no parameter",
        no_parameter,
        "linear1.weight is a torch.Tensor, no plain parameter",
    ),
    ("nothing there", lambda layer: delattr(layer.linear1, "weight"), "it has no linear1.weight"),
    (
        "mixed types",
        lambda layer: layer.norm1.float(),
        "self_attn.in_proj_weight is float64 and norm1.weight is float32: make all parameters alike",
    ),
    (
        "mixed devices",
        lambda layer: layer.linear1.to("meta"),
        "self_attn.in_proj_weight is cpu and linear1.weight is meta",
    ),
    ("tied", tied, "norm1.weight and norm2.weight are one parameter, and the model has two"),
]
BERT: list[tuple[str, Change, str]] = [
    (
        "RMSNorm",
        replaced("output.LayerNorm", lambda: nn.RMSNorm(8)),
        "its output.LayerNorm is a torch.nn.modules.normalization.RMSNorm",
    ),
    (
        "Sequential",
        replaced("intermediate", nn.Sequential),
        "its intermediate is a torch.nn.modules.container.Sequential, and the model has a BertIntermediate",
    ),
    ("nothing", replaced("attention.self.dropout", lambda: None), "its attention.self.dropout is missing"),
    ("own activation", replaced("intermediate.intermediate_act_fn", Doubled), "activation Doubled"),
    (
        "pruned",
        pruned("output.dense", "weight"),
        "output.dense.weight is computed from weight_orig",
    ),
    (
        "mixed types",
        lambda layer: layer.output.LayerNorm.float(),
        "attention.self.query.weight is float64 and output.LayerNorm.weight is float32",
    ),
    (
        "narrow",
        replaced("attention.self.key", lambda: nn.Linear(8, 4)),
        "attention.self.key.weight has shape (4, 8), and the model's is (8, 8)",
    ),
]


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any, **__: Any) -> None:
        raise AssertionError("it was tuned")

    monkeypatch.setattr("autotuner.api.tuning.tune_attended", measure)


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize(
    "make, change, sentence",
    [(lambda: encoder_layer(model()), *case[1:]) for case in ENCODER] + [(bert_layer, *case[1:]) for case in BERT],
    ids=[case[0] for case in ENCODER] + [f"bert {case[0]}" for case in BERT],
)
@pytest.mark.slow
def test_what_cannot_be_applied_is_refused_before_it_is_tuned(
    make: Callable[[], nn.Module], change: Change, sentence: str
) -> None:
    layer = make()
    change(layer)
    with pytest.raises(ConfigurationError, match=f"cannot be tuned: {re.escape(sentence)}") as before:
        autotuner.tune(layer, extents={axis: TINY[axis] for axis in "bl"})
    with pytest.raises(ConfigurationError) as after:
        apply(layer, configuration(model()))
    assert str(before.value) == str(after.value)


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("given", [None, 5, nn.TransformerEncoderLayer, {"model": "bert-encoder"}, nn.ReLU()])
def test_what_is_no_layer_is_refused_with_what_can_be_tuned(given: Any) -> None:
    with pytest.raises(AutotunerError, match=r"cannot be tuned; these can: .*TransformerEncoderLayer.*RobertaLayer"):
        autotuner.tune(given, extents={"b": 2, "l": 6})


class OnAbacus(nn.Module):
    def parameters(self, recurse: bool = True) -> Any:
        yield SimpleNamespace(device=SimpleNamespace(type="abacus", recurse=recurse))


@pytest.mark.parametrize(
    "given, options, wanted",
    [
        (OnAbacus(), {}, "abacus"),
        (OnAbacus(), {"device": "cpu"}, "cpu"),
        (nn.ReLU(), {}, "cpu"),
        (encoder_layer(model()).to("meta"), {}, "cpu"),
        ("bert-encoder:tiny", {}, "cpu"),
    ],
    ids=["module", "named", "no parameters", "no memory", "no module"],
)
def test_a_module_is_tuned_for_the_device_that_it_is_on(
    monkeypatch: pytest.MonkeyPatch, given: Any, options: dict[str, str], wanted: str
) -> None:
    def asked(device_type: str) -> None:
        raise DeviceError(f"asked for {device_type}")

    monkeypatch.setattr("autotuner.api.tuning.environment", asked)
    with pytest.raises(DeviceError, match=f"asked for {wanted}"):
        autotuner.tune(given, **options)  # type: ignore[call-overload]
