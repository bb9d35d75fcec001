"""Labels: of rows with the same states, those stay that no other equals in time and held bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.solve.labels import Labels, undominated_rows
from autotuner.solve.tables import CostTable

Weights = tuple[int, int, int]


def labels_of(rows: list[Weights], byte: int = 1) -> Labels:
    """Return rows of a state, a time and a count of held bytes."""
    states, times, held = np.array(rows, np.int64).reshape(-1, 3).T
    time_us = times.astype(np.float64)
    table = CostTable("t", (0,), states[np.newaxis].astype(np.int32), time_us)
    return Labels(table, time_us, held * byte)


def left(found: Labels, byte: int = 1) -> list[Weights]:
    columns = (found.table.columns[0], found.time_us, found.held_bytes // byte)
    return [(int(s), int(t), int(h)) for s, t, h in zip(*columns, strict=True)]


def beaten(row: Weights, others: list[Weights]) -> bool:
    return any(row[0] == other[0] and other[1] <= row[1] and other[2] <= row[2] for other in others)


rows_of_labels = st.lists(st.tuples(*(st.integers(0, most) for most in (2, 5, 4))), min_size=1, max_size=30)


@pytest.mark.slow
@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(rows=rows_of_labels, byte=st.sampled_from((1, 64)))
def test_the_rows_that_stay_are_those_that_no_other_equals(rows: list[Weights], byte: int) -> None:
    found = left(undominated_rows(labels_of(rows, byte), (3,)), byte)
    assert all(not beaten(row, found[:i] + found[i + 1 :]) for i, row in enumerate(found))
    assert set(found) <= set(rows)
    assert all(beaten(row, found) for row in rows)


def test_rows_without_a_common_measure_are_ordered_as_well() -> None:
    """The times, held bytes and states of these rows fill more than 64 bits together."""
    rows = [(0, 5, 0), (0, 4, (1 << 61) + 1), (0, 3, 1 << 62), (1, 9, 3), (0, 6, 1 << 60)]
    assert left(undominated_rows(labels_of(rows), (2,))) == [
        (0, 5, 0),
        (0, 4, (1 << 61) + 1),
        (0, 3, 1 << 62),
        (1, 9, 3),
    ]
