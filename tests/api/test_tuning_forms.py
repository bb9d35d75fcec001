"""The forms of a call of `tune`, as type checkers and people see them."""

from inspect import signature
from typing import get_overloads

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
