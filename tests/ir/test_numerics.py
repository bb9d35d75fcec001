"""Numerics classes: names, what each allows, and that every declaration is whole."""

from typing import get_args

import pytest

from autotuner.errors import InputError
from autotuner.ir.formats import FORMATS, StorageFormat
from autotuner.ir.numerics import CLASSES, NUMERICS, Numerics, NumericsClass, allowed_classes, checked_numerics
from autotuner.kernels import KERNELS


def test_every_name_has_a_declaration_and_a_format_or_kernel_that_is_of_it() -> None:
    assert get_args(Numerics) == NUMERICS == ("exact", *CLASSES)
    assert {each.numerics for each in FORMATS.values()} | {each.needs for each in KERNELS} == set(NUMERICS)


@pytest.mark.parametrize("declared", CLASSES.values(), ids=[*CLASSES])
def test_a_class_says_what_its_plans_do_and_by_how_much_they_may_be_off(declared: NumericsClass) -> None:
    assert 0 < declared.tolerance < 1
    assert declared.does.count("{}") == declared.explanation.count("{}") == 1
    for text in (declared.held, declared.regions):
        assert text.count("{}") == declared.for_memory
    assert "{}" not in declared.numbers + declared.checked


@pytest.mark.parametrize("declared", FORMATS.values(), ids=[*FORMATS])
def test_a_class_of_a_storage_format_is_for_memory(declared: StorageFormat) -> None:
    assert declared.numerics == "exact" or CLASSES[declared.numerics].for_memory


def test_a_class_allows_itself_and_what_is_exact() -> None:
    assert allowed_classes("exact") == ("exact",)
    assert allowed_classes("8-bit") == ("8-bit", "exact")


def test_a_name_that_is_none_lists_them_all() -> None:
    assert checked_numerics("fp8") == "fp8"
    with pytest.raises(InputError, match="numerics is 'int8': write exact, 8-bit or fp8"):
        checked_numerics("int8")
