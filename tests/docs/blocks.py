"""Fenced blocks of the documents, and the reasons of those that are not run."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = tuple(sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]))

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language and text, and why it is not run ("" for one that is run)."""

    path: Path
    line: int
    language: str
    text: str
    reason: str

    @property
    def name(self) -> str:
        return f"{self.path.name}:{self.line}"


def blocks(path: Path, language: str) -> list[Block]:
    """Return the blocks of a document in a language, in order."""
    text = path.read_text()
    return [
        Block(path, text.count("\n", 0, found.start("text")), language, found["text"], found["reason"] or "")
        for found in _BLOCK.finditer(text)
        if found["language"] == language
    ]
