import re
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autotuner.kernels.rules  # noqa: F401  (declares storage formats)
from autotuner.errors import LayoutError
from autotuner.ir.form import ABSENT, Form, Layout, Stack, Stored

letters = st.permutations("abcdefgh").flatmap(lambda p: st.integers(0, 8).map(lambda n: "".join(p[:n])))
groups = st.lists(st.from_regex(r"[a-z_][a-z0-9_.]{0,6}", fullmatch=True), max_size=3).map("+".join)


@st.composite
def forms(draw: st.DrawFn) -> Form:
    axes, storage = draw(letters), draw(st.sampled_from(["raw", "byte", "bit", "seed"]))
    if storage in ("bit", "seed") or draw(st.booleans()):
        return Form(Layout(axes), storage)
    place = draw(st.integers(0, len(axes)))
    count = draw(st.integers(1, 4))
    stack = Stack(draw(st.integers(0, count - 1)), count, draw(groups))
    return Form(Layout(f"{axes[:place]}*{axes[place:]}"), storage, stack)


@pytest.mark.slow
@given(forms())
def test_a_form_that_is_printed_and_parsed_is_the_same_form(form: Form) -> None:
    assert Form.parse(str(form)) == form


@pytest.mark.parametrize(
    "text", ["blh", "", "bnqk:byte", "bnqk:bit", "bnqk:seed", "bl*np@1/3", "*h@0/2#query+key", "absent"]
)
def test_a_text_that_is_parsed_and_printed_is_the_same_text(text: str) -> None:
    assert str(Form.parse(text)) == text


def test_the_parts_of_a_form_are_read_from_its_text() -> None:
    assert Form.parse("bl*np:byte@1/3#query+key+value") == Form(Layout("bl*np"), "byte", Stack(1, 3, "query+key+value"))
    assert Form.parse("bBl") == Form(Layout("bBl"))
    assert Form.parse("absent") is ABSENT


@pytest.mark.parametrize(
    "text, words",
    [
        ("b1", "'b1' is no form: write a layout like \"blh\""),
        ("b-l", "'b-l' is no form"),
        (" bl", "' bl' is no form"),
        ("bl@1", "'bl@1' is no form"),
        ("bb", "'bb' is no layout: write each axis once"),
        ("b**@0/2", "'b**' is no layout"),
        (
            "bl:bits",
            "'bits' is no storage format: write raw, byte, bit, seed, flash, cudnn, efficient, sign, int8 or absent",
        ),
        ("b*l:bit@0/2", "a slice of a stack cannot be stored as a bit: write raw or byte"),
        ("bl*", "'bl*': a stacking axis `*` and a slice `@index/count` go together"),
        ("bl@0/2", "'bl': a stacking axis `*` and a slice `@index/count` go together"),
        ("bl*@2/2", "slice 2 of a stack of 2: the index must be below the count"),
    ],
)
def test_a_text_that_is_no_form_is_refused_in_a_sentence(text: str, words: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(words)):
        Form.parse(text)


@pytest.mark.parametrize("axes", ["bb", "BB", "b1", "é", "b**"])
def test_a_layout_takes_each_axis_once_as_a_letter(axes: str) -> None:
    with pytest.raises(LayoutError, match="write each axis once, as one of a-z"):
        Layout(axes)


def test_the_last_axis_of_a_layout_is_contiguous() -> None:
    extents = {"b": 2, "h": 3, "k": 5}
    assert Layout("bhk").strides(extents) == {"b": 15, "h": 5, "k": 1}
    assert Layout("khb").strides(extents) == {"k": 6, "h": 2, "b": 1}


def test_strides_stand_in_the_order_of_the_declared_axes() -> None:
    assert Form.parse("bhk").placed("bhk", (2, 3, 5)) == ((15, 5, 1), 0, 30)
    assert Form.parse("khb").placed("bhk", (2, 3, 5)) == ((1, 2, 6), 0, 30)


def test_a_slice_lies_in_the_buffer_of_its_whole_stack() -> None:
    # b has 2 elements, l 3; three tensors share 18 elements: b*l strides are 9, 3, 1.
    assert Form.parse("b*l@0/3").placed("bl", (2, 3)) == ((9, 1), 0, 18)
    assert Form.parse("b*l@2/3").placed("bl", (2, 3)) == ((9, 1), 6, 18)
    assert Form.parse("*bl@1/3").placed("bl", (2, 3)) == ((3, 1), 6, 18)
    assert Form.parse("bl*@1/3").placed("bl", (2, 3)) == ((9, 3), 1, 18)


def test_a_number_has_one_element_and_no_strides() -> None:
    assert Form.parse("").placed("", ()) == ((), 0, 1)


@pytest.mark.parametrize("order", ["".join(p) for p in permutations("*abc")])
def test_the_slices_of_a_stack_share_no_element_and_leave_none(order: str) -> None:
    extents, count, places = (2, 3, 2), 3, []
    for index in range(count):
        strides, offset, length = Form.parse(f"{order}@{index}/{count}").placed("abc", extents)
        steps = product(*(range(extent) for extent in extents))
        places += [offset + sum(i * s for i, s in zip(step, strides, strict=True)) for step in steps]
    assert sorted(places) == list(range(36)) == list(range(length))


@pytest.mark.parametrize("text, axes", [("bh", "bhk"), ("bhkx", "bhk"), ("bhx", "bhk"), ("absent", "b")])
def test_a_form_that_does_not_permute_the_axes_of_its_tensor_is_refused(text: str, axes: str) -> None:
    with pytest.raises(LayoutError, match=f"form {text} does not fit a tensor with axes '{axes}'"):
        Form.parse(text).placed(axes, (2,) * len(axes))


def test_renaming_changes_letters_and_nothing_else() -> None:
    assert str(Form.parse("l*b:byte@1/2#x+y").renamed("bl", "ab")) == "b*a:byte@1/2#x+y"


def test_a_nameless_form_keeps_its_place_in_the_stack() -> None:
    assert str(Form.parse("b*l@1/2#x+y").nameless()) == "b*l@1/2"
    assert Form.parse("bl").nameless() == Form.parse("bl")


def test_storage_is_one_of_nine() -> None:
    with pytest.raises(LayoutError, match="'float' is no storage format: write raw, byte, bit, seed, flash, cudnn, "):
        Form(Layout("b"), "float")


@pytest.mark.parametrize(
    "text, stored",
    [
        ("khb", Stored("float32", (2, 3, 5), (1, 2, 6), 0, 30)),
        ("khb:byte", Stored("bool", (2, 3, 5), (1, 2, 6), 0, 30)),
        ("khb:bit", Stored("uint8", (4,), (1,), 0, 4)),
        ("khb:seed", Stored("int64", (1,), (1,), 0, 1)),
        ("*bhk@1/2", Stored("float32", (2, 3, 5), (15, 5, 1), 30, 60)),
    ],
)
def test_what_memory_holds_follows_from_the_form(text: str, stored: Stored) -> None:
    # 30 elements are 4 bytes of bits, two of them over.
    assert Form.parse(text).stored("float32", "bhk", (2, 3, 5)) == stored


@pytest.mark.parametrize("text", ["bhk:bit", "bhk:seed"])
def test_bits_and_seeds_have_no_strides(text: str) -> None:
    with pytest.raises(LayoutError, match=f"form {text} has no strides"):
        Form.parse(text).placed("bhk", (2, 3, 5))
    with pytest.raises(LayoutError, match=f"form {text} does not fit a tensor with axes 'bh'"):
        Form.parse(text).stored("float32", "bh", (2, 3))


def test_an_absent_tensor_is_not_stored() -> None:
    with pytest.raises(LayoutError, match="an absent tensor is not stored"):
        ABSENT.stored("float32", "b", (2,))
