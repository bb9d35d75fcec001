"""Axes: views split and merge them, sums and products find which are the same."""

from contextlib import suppress
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.runtime.capture.axes import Axes, Axis, UnknownError, are_shuffled, extent, fresh, whole


def test_a_view_splits_an_axis_and_merging_it_again_gives_the_same() -> None:
    axes = Axes()
    (features,) = fresh([32])
    heads, rest = axes.regrouped([features], [4, 8])
    assert [axis.extent for axis in whole(features)] == [4, 8]
    assert axes.regrouped([heads, rest], [32]) == (tuple(whole(features)),)


def test_a_view_that_cuts_an_axis_is_refused() -> None:
    with pytest.raises(UnknownError, match="cannot be split into 4 parts"):
        Axes().regrouped(fresh([6, 4]), [4, 6])
    with pytest.raises(UnknownError, match="of other extents"):
        Axes().regrouped(fresh([6]), [6, 2])


def test_a_dimension_of_one_element_has_no_axes() -> None:
    assert fresh([1, 3])[0] == ()
    assert extent(()) == 1


def test_free_axes_become_those_that_they_are_found_to_be() -> None:
    axes = Axes()
    bound, free = fresh([8]), fresh([8])
    axes.bind(bound)
    assert axes.unite(bound[0], free[0]) == []
    assert whole(free[0]) == whole(bound[0])


def test_two_bound_axes_stay_two_and_the_operator_renames_one() -> None:
    axes = Axes()
    one, other = fresh([8]), fresh([8])
    axes.bind((*one, *other))
    assert axes.unite(one[0], other[0]) == [(*whole(other[0]), *whole(one[0]))]


def test_a_split_of_one_side_splits_the_other() -> None:
    axes = Axes()
    heads, features = fresh([4, 8]), fresh([32])
    assert axes.unite((*heads[0], *heads[1]), features[0]) == []
    assert whole(features[0]) == [*heads[0], *heads[1]]


def test_what_was_found_can_be_taken_back() -> None:
    axes = Axes()
    (features,) = fresh([32])
    mark = axes.mark()
    axes.regrouped([features], [4, 8])
    axes.take_back(mark)
    assert [axis.extent for axis in whole(features)] == [32]


def test_other_extents_do_not_go_together() -> None:
    with pytest.raises(UnknownError, match="dimensions of 8 and 4 elements"):
        Axes().unite((Axis(8),), (Axis(4),))


def test_a_view_that_regroups_across_axes_is_refused() -> None:
    with pytest.raises(UnknownError, match=r"a view as \(12, 4, 16\) cuts an axis of 8 elements"):
        Axes().regrouped(fresh([8, 6, 16]), [12, 4, 16])


def test_a_view_of_more_or_fewer_elements_is_refused() -> None:
    for shape in ([3], [6, 0], [12], []):
        with pytest.raises(UnknownError, match="of other extents"):
            Axes().regrouped(fresh([6]), shape)


def test_dimensions_that_stand_for_each_other_crosswise_are_refused() -> None:
    """As in a sum of a matrix and its transpose, both seen as vectors."""
    (one,), (other,) = fresh([4, 4])
    with pytest.raises(UnknownError, match="crosswise"):
        Axes().unite((one, other), (other, one))
    assert whole((one, other)) == [one, one]  # and that ends


def test_an_axis_that_stands_further_behind_as_well_is_split_there_too() -> None:
    (long,), (short,) = fresh([8, 2])
    axes = Axes()
    found = axes.pairs((long, short), (short, long))
    assert all(one.parts is None and other.parts is None for one, other in found)
    assert [one.extent for one, _ in found] == [2, 2, 2, 2]


EXTENTS = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@settings(max_examples=300)
@given(EXTENTS, EXTENTS)
def test_a_view_ends_and_is_read_as_what_it_is_or_refused(given_shape: list[int], wanted: list[int]) -> None:
    """An element's place, from the places along the axes that a view was found to have, is that in memory."""
    axes, dims = Axes(), fresh(given_shape)
    try:
        found = axes.regrouped(dims, wanted)
    except UnknownError:
        # No axes of both: some product of leading extents of one shape is none of the other's, however it is split.
        assert prod(given_shape) != prod(wanted) or not _nests(given_shape, wanted)
        return
    assert [extent(whole(dim)) for dim in found] == wanted
    assert whole(axis for dim in found for axis in dim) == whole(axis for dim in dims for axis in dim)
    assert [extent(whole(dim)) for dim in dims] == given_shape


def _nests(one: list[int], other: list[int]) -> bool:
    """Say whether the places where two shapes cut one memory divide each other."""
    cuts = sorted({prod(shape[:count]) for shape in (one, other) for count in range(len(shape) + 1)})
    return all(larger % smaller == 0 for smaller, larger in pairwise(cuts))


@settings(max_examples=300)
@given(st.permutations([2, 3, 4, 6, 8]), st.permutations([2, 3, 4, 6, 8]), st.booleans())
def test_uniting_ends_and_leaves_every_dimension_its_extent(one: list[int], other: list[int], free: bool) -> None:
    axes = Axes()
    dims = dict(zip([2, 3, 4, 6, 8], fresh([2, 3, 4, 6, 8]), strict=True))
    if not free:
        axes.bind(dims.values())
    first, second = (tuple(axis for size in each for axis in dims[size]) for each in (one, other))
    with suppress(UnknownError):
        axes.unite(first, second)
    assert [extent(whole(dim)) for dim in dims.values()] == [2, 3, 4, 6, 8]


def test_positions_of_windows_are_shuffled_and_heads_with_their_features_are_not() -> None:
    axes = Axes()
    image = fresh([2, 8, 12, 32])
    batch, down, rows, across, columns, features = axes.regrouped(image, [2, 2, 4, 3, 4, 32])
    memory = whole(axis for dim in image for axis in dim)
    assert are_shuffled((*rows, *columns), memory)
    assert are_shuffled((*batch, *down, *across), memory)
    assert not are_shuffled((*batch, *down), memory)
    assert not are_shuffled((*rows, *across), memory), "they lie one behind the other"
    assert not are_shuffled((*batch, *features), memory), "none of them is a part"
    context = [*rows, *features]  # as attention's, which has heads of a query that it does not have as a whole
    assert not are_shuffled((*rows, *features), context)


def test_parts_of_one_axis_in_another_order_are_not_shuffled() -> None:
    axes = Axes()
    (features,) = fresh([32])
    heads, rest = axes.regrouped([features], [4, 8])
    assert not are_shuffled((*rest, *heads), whole(features))
