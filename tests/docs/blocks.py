"""Fenced blocks of the documents: what each is, and what in a block of plain text is code after all."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = tuple(sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]))
RUN = ("python", "bash", "console")
"""Languages of blocks that run: Python or a session with `>>>`; commands; commands behind `$` with what they print."""

CHECKED = ("json", "yaml", "nginx")
"""Languages of blocks that are read as what they say they are."""

PLAIN = "text"
"""The language of output, messages and pictures."""

_BLOCK = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(
    r"(?:\$ )?(?:sudo )?(?:(?:autotuner|python3?|pip|docker|curl|ray|git|kubectl|sbatch|srun|systemctl|psql|pg_dump|"
    r"pg_restore|createdb|export|cd)\s+\S|(?:scripts|\.ci|\.venv/bin|\./?\w+)/\w)"
)
_CODE = (ast.Import, ast.ImportFrom, ast.Call, ast.FunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Block:
    """A fenced block: its document, the line of its fence, its language, and its text without the fence's indent."""

    path: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def first(self) -> str:
        """The first line."""
        return self.text.partition("\n")[0]


def blocks(path: Path) -> list[Block]:
    """Return the blocks of a document in order."""
    text = path.read_text()
    return [
        Block(
            path, text.count("\n", 0, found.start()) + 1, found["language"], _unindented(found["text"], found["indent"])
        )
        for found in _BLOCK.finditer(text)
    ]


def _unindented(text: str, indent: str) -> str:
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))


def all_blocks() -> Iterator[Block]:
    for path in DOCUMENTS:
        yield from blocks(path)


def code_in(text: str) -> str | None:
    """Return a line of plain text that is a command or Python, or None where there is none."""
    for line in text.splitlines():
        if _COMMAND.match(line.strip()) or _is_python(line.strip()):
            return line.strip()
    return text.partition("\n")[0] if _is_python(text) else None


def _is_python(text: str) -> bool:
    """Tell whether text is Python that does something: an import, a call or a definition."""
    try:
        found = ast.parse(text.removeprefix(">>> "))
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(node, _CODE) for node in ast.walk(found))
