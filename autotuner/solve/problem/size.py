"""The size of a problem while it is built, and how large it may become."""

from autotuner.checkpoint import checkpoint
from autotuner.errors import ProblemError

ROWS_MAX = 10_000_000
"""Of all factors, 220 bytes each: 24 encoder layers written out have 3.5 million, and 8.4 million under a budget."""


def check_rows(rows: int) -> None:
    """Check that a problem has no more rows than memory takes.

    Raises:
        ProblemError: it has.
    """
    checkpoint()
    if rows > ROWS_MAX:
        raise ProblemError(
            f"the problem has more than {ROWS_MAX:,} rows: tune one of the layers that repeat, give tensors fewer "
            "axes, or a search space with fewer kernels or `layouts: declared`"
        )
