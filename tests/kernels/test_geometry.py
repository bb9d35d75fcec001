"""How operands lie, seen through a spec: merged axes, matrices, and every layout triple of a product."""

from collections.abc import Sequence

import pytest

from autotuner.ir.form import Form
from autotuner.ir.records import Node, Subgraph, TensorType
from autotuner.kernels.geometry import (
    Group,
    Matrices,
    arrangements,
    as_matrices,
    contraction_layouts,
    letter_extents,
    letter_groups,
    memory_orders,
    merge,
    operand_letters,
    operand_strides,
    orders,
    packed,
    translate,
    unit_stride,
)

PROJECTION = Node("contraction", "abc,dec->abde", (0, 1), (2,))
SCORES = Node("contraction", "abcd,aecd->acbe", (0, 1), (2,))
DRAW = Node("dropout_mask", "->ab", (), (0,))


def placed(node: Node, shapes: Sequence[tuple[int, ...]], *forms: str) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Return strides and extents by letter for operands that lie in these forms."""
    places = tuple(range(len(shapes)))
    subgraph = Subgraph((node,), tuple(TensorType(shape, "float32") for shape in shapes), places[:-1], places[-1:])
    by_number = {number: Form.parse(text) for number, text in enumerate(forms)}
    return [dict(s) for s in operand_strides(subgraph, node, by_number)], letter_extents(subgraph, node)


def test_letters_are_those_of_inputs_then_outputs() -> None:
    assert operand_letters(PROJECTION) == ("abc", "dec", "abde")
    assert operand_letters(DRAW) == ("ab",)


def test_letters_of_a_product_have_four_roles() -> None:
    assert letter_groups(PROJECTION) == ("", "ab", "de", "c")
    assert letter_groups(SCORES) == ("ac", "b", "e", "d")


@pytest.mark.parametrize(
    "strides, group",
    [
        ([{"a": 12, "b": 4, "c": 1}], Group("abc", 24, (1,))),
        ([{"a": 1, "b": 2, "c": 6}], Group("cba", 24, (1,))),
        ([{"a": 120, "b": 40, "c": 10}, {"a": 12, "b": 4, "c": 1}], Group("abc", 24, (10, 1))),
        ([{"a": 12, "b": 4, "c": 1}, {"a": 1, "b": 2, "c": 6}], None),
        ([{"a": 24, "b": 4, "c": 1}], None),
    ],
)
def test_axes_merge_where_they_lie_one_behind_the_other_in_every_operand(
    strides: list[dict[str, int]], group: Group | None
) -> None:
    assert merge("abc", strides, {"a": 2, "b": 3, "c": 4}) == group


def test_axes_of_one_element_merge_with_anything() -> None:
    assert merge("ab", [{"a": 1, "b": 1}, {"a": 77, "b": 5}], {"a": 1, "b": 3}) == Group("b", 3, (1, 5))
    assert merge("ab", [{"a": 9, "b": 9}], {"a": 1, "b": 1}) == Group("", 1, (1,))


def test_a_contraction_is_one_matrix_product() -> None:
    strides, extents = placed(PROJECTION, [(2, 3, 4), (5, 6, 4), (2, 3, 5, 6)], "abc", "cab", "deab".translate(
        str.maketrans("abde", "abcd")))  # fmt: skip
    assert as_matrices(PROJECTION, strides, extents) == Matrices(
        batch=1, m=6, n=30, k=4, a=(1, 4, 1), b=(1, 30, 1), c=(1, 1, 6)
    )


def test_a_slice_of_a_stack_is_a_matrix_with_a_longer_pitch() -> None:
    strides, extents = placed(PROJECTION, [(2, 3, 4), (5, 6, 4), (2, 3, 5, 6)], "abc", "abc", "ab*cd@2/3")
    matrices = as_matrices(PROJECTION, strides, extents)
    assert isinstance(matrices, Matrices)
    assert matrices.c == (1, 90, 1)


def test_a_batch_may_stand_outermost_or_between_rows_and_columns() -> None:
    shapes = [(2, 5, 3, 4), (2, 6, 3, 4), (2, 3, 5, 6)]
    strides, extents = placed(SCORES, shapes, "acbd", "bacd", "abcd")
    assert as_matrices(SCORES, strides, extents) == Matrices(
        batch=6, m=5, n=6, k=4, a=(20, 4, 1), b=(4, 1, 24), c=(30, 6, 1)
    )


def test_what_is_no_matrix_says_which_axes_are_to_blame() -> None:
    shapes = [(2, 5, 3, 4), (2, 6, 3, 4), (2, 3, 5, 6)]
    strides, extents = placed(SCORES, shapes, "abcd", "abcd", "abcd")
    assert as_matrices(SCORES, strides, extents) == "the batch axes 'ac' do not act as one axis in every operand"


@pytest.mark.parametrize(
    "matrix, rows, columns, unit, dense",
    [
        ((30, 6, 1), 5, 6, True, True),
        ((30, 1, 5), 5, 6, True, True),
        ((90, 6, 1), 5, 6, True, False),
        ((6, 36, 1), 5, 6, True, False),
        ((60, 12, 2), 5, 6, False, False),
        ((1, 9, 9), 1, 1, True, False),
    ],
)
def test_a_library_takes_a_matrix_with_one_contiguous_axis(
    matrix: tuple[int, int, int], rows: int, columns: int, unit: bool, dense: bool
) -> None:
    assert unit_stride(matrix, rows, columns) is unit
    assert packed(matrix, rows, columns) is dense


def test_a_product_of_single_axes_has_eight_layout_triples() -> None:
    plain = list(contraction_layouts(Node("contraction", "ab,bc->ac", (0, 1), (2,))))
    assert len(plain) == len(set(plain)) == 2 * 2 * 2
    assert ("ab", "bc", "ac") in plain
    assert ("ba", "cb", "ca") in plain


@pytest.mark.parametrize(
    "spec, count",
    [
        ("ab,bc->ac", 8),
        ("abc,dc->abd", 8 * 2),
        ("abc,dec->abde", 8 * 2 * 2),
        ("abc,adc->abd", 4 * 4 * 4),
        ("abcd,aecd->acbe", 4 * 4 * 4 * 2),
    ],
)
def test_orders_of_merged_axes_multiply_the_triples(spec: str, count: int) -> None:
    rows = list(contraction_layouts(Node("contraction", spec, (0, 1), (2,))))
    assert len(rows) == len(set(rows)) == count


def test_every_layout_triple_is_one_matrix_product() -> None:
    shapes = [(2, 5, 3, 4), (2, 6, 3, 4), (2, 3, 5, 6)]
    for row in contraction_layouts(SCORES):
        forms = [translate(t, own, "abcd") for t, own in zip(row, operand_letters(SCORES), strict=True)]
        matrices = as_matrices(SCORES, *placed(SCORES, shapes, *forms))
        assert isinstance(matrices, Matrices)
        assert (matrices.batch, matrices.m, matrices.n, matrices.k) == (6, 5, 6, 4)


def test_arrangements_of_a_batched_operand() -> None:
    assert arrangements("", "m", "k") == ["mk", "km"]
    assert arrangements("g", "m", "k") == ["gmk", "gkm", "mgk", "kgm"]


def test_a_layout_is_translated_by_place() -> None:
    assert translate("cab", "abc", "blh") == "hbl"


def test_few_axes_are_tried_in_every_order_and_many_in_few() -> None:
    assert (len(orders("ab")), len(orders("abc")), orders("abcd")) == (2, 6, ["abcd"])
    assert len(memory_orders("abcde")) == 120
    moved = memory_orders("abcdef")
    assert moved[0] == "abcdef"
    assert {"fabcde", "bcdefa", "cabdef"} <= set(moved)
    assert len(moved) == len(set(moved)) == 11


def test_a_product_over_windows_has_few_layouts() -> None:
    """Positions that a window splits in four, and features: 120 orders of the first alone would be 960 layouts."""
    assert len(list(contraction_layouts(Node("contraction", "abcdef,gf->abcdeg", (0, 1), (2,))))) == 8
