"""Storage formats: what each stores of a tensor, which tensors may have it, and that every declaration is whole."""

import re

import pytest

from autotuner.errors import LayoutError
from autotuner.ir.form import Form, Stored
from autotuner.ir.formats import FORMATS, StorageFormat, format_of
from autotuner.ir.kinds import KINDS, Kind
from autotuner.kernels.registry import load

EVERY = list(FORMATS.values())
IN_MEMORY = [each for each in EVERY if each.in_memory]


def symbols_of(kind: Kind) -> list[str]:
    """Return the symbols of a kind's inputs and then outputs."""
    return [symbol for side in kind.pattern.split("->") for symbol in side.split(",") if symbol]


@pytest.mark.parametrize("declared", EVERY, ids=list(FORMATS))
def test_a_format_is_declared_under_its_name_and_names_places_of_kinds_that_exist(declared: StorageFormat) -> None:
    assert format_of(declared.name) is declared
    assert re.fullmatch("[a-z]+[0-9]*", declared.name)
    for kind, places in declared.operands.items():
        count = len(symbols_of(KINDS[kind])) or len("abc")  # of a contraction, which has no pattern
        assert all(place < count for place in places)


@pytest.mark.parametrize("declared", IN_MEMORY, ids=[each.name for each in IN_MEMORY])
def test_what_is_stored_can_be_encoded_and_decoded(declared: StorageFormat) -> None:
    assert callable(load(declared.encode))
    assert callable(load(declared.decode))


@pytest.mark.parametrize(
    "text, stored",
    [
        ("ba", Stored("float32", (3, 5), (1, 3), 0, 15)),
        ("ba:byte", Stored("bool", (3, 5), (1, 3), 0, 15)),
        ("ba:bit", Stored("uint8", (2,), (1,), 0, 2)),
        ("ba:sign", Stored("uint8", (2,), (1,), 0, 2)),
        ("ba:int8", Stored("uint8", (132,), (1,), 0, 132)),
        ("ba:seed", Stored("int64", (1,), (1,), 0, 1)),
        ("ba:efficient", Stored("int64", (2,), (1,), 0, 2)),
    ],
)
def test_a_format_says_what_memory_holds_of_15_elements(text: str, stored: Stored) -> None:
    assert Form.parse(text).stored("float32", "ab", (3, 5)) == stored


def test_signs_are_of_what_relu_makes_and_its_gradient_reads_second() -> None:
    signs = FORMATS["sign"]
    assert signs.admits("relu", 1)
    assert signs.admits("relu_grad", 1)
    assert not signs.admits("relu_grad", 0)
    assert not signs.admits("gelu_erf_grad", 1)


def test_formats_of_masks_are_for_all_that_kinds_write_as_masks() -> None:
    places = {
        kind.name: tuple(place for place, symbol in enumerate(symbols_of(kind)) if symbol == "M")
        for kind in KINDS.values()
        if "M" in symbols_of(kind)
    }
    assert {name for name, each in FORMATS.items() if each.is_of_masks} == {
        "byte", "bit", "seed", "flash", "cudnn", "efficient",
    }  # fmt: skip
    assert all(dict(each.operands) == places for each in EVERY if each.is_of_masks)


def test_any_tensor_may_be_raw_and_only_masks_may_be_bits() -> None:
    assert FORMATS["raw"].admits("contraction", 2)
    assert FORMATS["bit"].admits("dropout", 1)
    assert not FORMATS["bit"].admits("dropout", 0)


def test_a_format_for_memory_alone_is_offered_where_memory_is_saved_and_an_inexact_one_where_it_is_allowed() -> None:
    assert FORMATS["bit"].is_offered(saving=False)
    assert not FORMATS["seed"].is_offered(saving=False)
    assert FORMATS["seed"].is_offered(saving=True)
    assert not FORMATS["int8"].is_offered(saving=True)
    assert FORMATS["int8"].is_offered(saving=False, numerics="8-bit")
    assert not FORMATS["seed"].is_offered(saving=False, numerics="8-bit")


def test_only_integers_of_8_bits_are_not_exact() -> None:
    assert {name: each.numerics for name, each in FORMATS.items() if each.numerics != "exact"} == {"int8": "8-bit"}


def test_a_missing_format_lists_what_is_known() -> None:
    with pytest.raises(LayoutError, match=r"'bits' is no storage format: write raw, byte, bit, seed, .* or absent"):
        format_of("bits")
