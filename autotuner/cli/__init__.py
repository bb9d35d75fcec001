"""The command line. Whatever is slow to import is imported by the command that needs it."""

from autotuner.cli.program import app, main

__all__ = ["app", "main"]
