"""The command line. Whatever is slow to import is imported by the command that needs it."""

import gc
import sys

from autotuner.errors import MissingError
from autotuner.extras import needed_for

RARELY = (100_000, 50, 100)
"""Thresholds of garbage collection: with Python's own, it takes a tenth of a command that imports torch."""


def main() -> None:
    """Run the command line, or say which extra installs it."""
    gc.set_threshold(*RARELY)
    try:
        with needed_for("the command line"):
            from autotuner.cli.program import main as run
    except MissingError as error:
        print(f"error {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    run()
