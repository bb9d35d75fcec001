"""Consoles and JSON. What comes from outside is printed as it is, never as markup, and never moves the cursor.

Names of models, presets and workers, messages and paths come from files, databases and services that anybody may have
written. Styles are given beside a text, not inside it.
"""

import json
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from autotuner.plan.phrases import plain


def lines(texts: list[str]) -> Text:
    """Return texts below each other, each on a line of its own."""
    return Text("\n".join(map(plain, texts)))


class PlainConsole(Console):
    """A console that takes no text for markup, emoji or numbers to colour, and prints no control character."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text that a string is shown as, also in the cells and titles of tables."""
        return super().render_str(plain(text), **{**options, "markup": False, "emoji": False})


out = PlainConsole()
err = PlainConsole(stderr=True)


def emit(value: Any) -> None:
    """Print JSON for programs: on standard output, never wrapped or coloured."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
