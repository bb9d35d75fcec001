"""The package as a reader meets it: few packages and arrows, one meaning per class name, docstrings of things."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "autotuner"
PACKAGES_MAX = 18
ARROWS_MAX = 95
"""The fleet stands above the server, so it alone has a dozen."""
QUESTIONS = {"what", "how", "why", "where", "which", "who", "when", "whether"}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(), str(path))
    return found


def chapter(module: str) -> str:
    """The package or module directly below `autotuner` that holds a module; "" for `autotuner` itself."""
    return module.partition(".")[2].partition(".")[0]


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_there_are_few_packages_and_few_arrows_between_them() -> None:
    chapters = {chapter(name) for name in modules()} - {""}
    arrows = {
        (chapter(name), chapter(target))
        for name, tree in modules().items()
        for target in imported(tree)
        if target.partition(".")[0] == "autotuner" and chapter(name) and chapter(target) in chapters
    }
    assert len(chapters) <= PACKAGES_MAX, sorted(chapters)
    assert len({(source, target) for source, target in arrows if source != target}) <= ARROWS_MAX, sorted(arrows)


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_docstring_begins_with_a_question() -> None:
    """Also of constants and fields: every text that stands alone."""
    found = [
        f"{name}: {text.splitlines()[0]}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(text := node.value.value, str)
        if text.split()[0].strip(",:").lower() in QUESTIONS
    ]
    assert not found, "\n".join(["name the thing (CONTRIBUTING):", *found])
