"""Signatures of the package: a function with many arguments takes them by keyword."""

import ast
from collections.abc import Iterator
from pathlib import Path

import autotuner

POSITIONAL_MAX = 9


def positional() -> Iterator[tuple[str, int]]:
    """Yield each function of the package and how many positional arguments it takes, beside self.

    Programs of Triton are left out: what launches them passes pointers, strides and constants by their names.
    """
    folder = Path(autotuner.__file__).parent
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            is_program = isinstance(node, ast.FunctionDef) and any(
                ast.unparse(each).startswith("triton.jit") for each in node.decorator_list
            )
            if isinstance(node, ast.FunctionDef) and not is_program:
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
                yield f"{file.relative_to(folder)}: {node.name}", len(names) - (names[:1] in (["self"], ["cls"]))


def test_no_function_has_ten_positional_arguments() -> None:
    found = dict(positional())
    assert len(found) > 1000
    assert {name: count for name, count in found.items() if count > POSITIONAL_MAX} == {}
