"""The forms of a call of `tune`, as type checkers and people see them."""

from collections.abc import Callable
from inspect import signature
from typing import Any, get_overloads

import pytest
import torch
from torch import nn

import autotuner
from autotuner.api.tuning import TuningKeywords, tune
from autotuner.plan.configuration import Configuration
from autotuner.settings import TuneOptions


def test_a_model_has_one_configuration_and_a_modules_calls_have_a_list_of_them() -> None:
    returned = [(list(signature(form).parameters), form.__annotations__["return"]) for form in get_overloads(tune)]
    assert returned == [
        (["model", "example_inputs", "extents", "options", "dtype", "mode", "effort"], Configuration),
        (["model", "example_inputs", "effort"], list[Configuration]),
        (["model", "example_inputs", "batches", "effort"], list[Configuration]),
    ]


def test_every_form_takes_the_keywords_that_tune_itself_has() -> None:
    own = {name for name, each in signature(tune).parameters.items() if each.kind is each.KEYWORD_ONLY}
    of_forms = {name for form in get_overloads(tune) for name in signature(form).parameters}
    assert set(TuningKeywords.__annotations__) == (own - of_forms) | set(TuneOptions.names())


@pytest.mark.parametrize("call", [
    lambda **options: autotuner.tune(nn.Linear(2, 2), (torch.ones(2),), **options),
    lambda **options: autotuner.optimize(nn.Linear(2, 2), **options),
    lambda **options: autotuner.training_step(net := nn.Linear(2, 2), torch.optim.SGD(net.parameters()), **options),
    lambda **options: autotuner.layer_to_layer(net := nn.Linear(2, 2), torch.optim.SGD(net.parameters()), **options),
])  # fmt: skip
def test_an_unknown_option_ends_a_call_also_where_nothing_is_tuned(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"^a tuning has no option 'gapp': it has gap, estimated_gap, "):
        call(gapp=0.1)
