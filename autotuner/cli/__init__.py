"""The command line. Whatever is slow to import is imported by the command that needs it."""

import sys

from autotuner.errors import MissingError
from autotuner.extras import needed_for


def main() -> None:
    """Run the command line, or say which extra installs it."""
    try:
        with needed_for("the command line"):
            from autotuner.cli.program import main as run
    except MissingError as error:
        print(f"error {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    run()
