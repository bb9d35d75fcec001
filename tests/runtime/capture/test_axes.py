"""Axes: views split and merge them, sums and products find which are the same."""

import pytest

from autotuner.runtime.capture.axes import Axes, Axis, UnknownError, extent, fresh, whole


def test_a_view_splits_an_axis_and_merging_it_again_gives_the_same() -> None:
    axes = Axes()
    (features,) = fresh([32])
    heads, rest = axes.regrouped([features], [4, 8])
    assert [axis.extent for axis in whole(features)] == [4, 8]
    assert axes.regrouped([heads, rest], [32]) == (tuple(whole(features)),)


def test_a_view_that_cuts_an_axis_is_refused() -> None:
    with pytest.raises(UnknownError, match="cannot be split into 4 parts"):
        Axes().regrouped(fresh([6]), [4, 2])
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
