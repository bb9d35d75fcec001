"""LayerDrop of transformers' models, with a probability of 0: no number is drawn for it.

Up to version 5.17 at least, and no longer in 5.23, encoders and decoders draw one on the host for each layer, and
compare it with the probability, which is 0 by default. Dynamo cuts the graph at each of these decisions, and a step
that draws on the host is not captured. So their forward is written anew, with one change: the number is drawn where it
is compared, and only for a probability above 0. (A mode of torch functions would be simpler. Dynamo of torch 2.11 looks
for none where a tensor is made.)
"""

import __future__

import ast
import re
from collections.abc import Callable
from functools import cache, update_wrapper
from inspect import getsource, unwrap
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

_DRAWN = re.compile(r"\b(\w+) = torch\.rand\(\[\]\)")


class _DrawnLate(ast.NodeTransformer):
    """Have numbers of [0, 1) drawn where they are compared with a probability that is above 0."""

    def __init__(self, names: set[str]) -> None:
        self._compared = re.compile(rf"(?:{'|'.join(names)}) < (?P<probability>self\.(?:config\.)?layerdrop)")

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return ast.Constant(1.0) if ast.unparse(node) == "torch.rand([])" else self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        found = self._compared.fullmatch(ast.unparse(node))
        if found is None:
            return self.generic_visit(node)
        probability = found["probability"]
        return ast.parse(f"{probability} > 0 and bool(torch.rand([]) < {probability})", mode="eval").body


def draw_for_no_layer(model: Any) -> None:
    """Have the modules of a model that drop layers with a probability of 0 draw nothing for that.

    They compute what they did. The generator on the host, which they moved on, stays as it is.
    """
    own = getattr(model, "_orig_mod", model)
    for module in own.modules() if isinstance(own, nn.Module) else ():
        probability = getattr(module, "layerdrop", getattr(getattr(module, "config", None), "layerdrop", None))
        if probability == 0 and "forward" not in vars(module):
            forward = _drawing_late(type(module).forward)
            if forward is not None:
                module.forward = MethodType(forward, module)


@cache
def _drawing_late(forward: Callable[..., Any]) -> Any:
    """Return a function that draws numbers late.

    None: it draws none, or only some, or does more with them than to compare each once.
    """
    drawn = unwrap(forward)
    try:
        source = getsource(drawn)
    except (OSError, TypeError):
        return None
    names, uses = _DRAWN.findall(source), 0
    for name in set(names):
        compared = len(re.findall(rf"\b{name} < self\.(?:config\.)?layerdrop\b", source))
        uses += len(re.findall(rf"\b{name}\b", source)) if compared == names.count(name) else 0
    is_known = names and uses == 2 * len(names) and source.count("torch.rand(") == len(names)
    if not is_known or "layerdrop > 0" in source or drawn.__closure__:
        return None
    written = ast.parse("if True:\n" + source)  # as it is indented
    written.body[0].body[0].decorator_list = []  # type: ignore[attr-defined]
    ast.increment_lineno(_DrawnLate(set(names)).visit(written), drawn.__code__.co_firstlineno - 2)
    path, flags = drawn.__code__.co_filename, __future__.annotations.compiler_flag  # by which they are text
    compiled = compile(ast.fix_missing_locations(written), path, "exec", flags)
    own = (each for each in compiled.co_consts if isinstance(each, CodeType) and each.co_name == drawn.__name__)
    return _with_code(forward, next(own))


def _with_code(forward: Any, code: CodeType) -> Any:
    """Return a function with other code, or, if it is decorated, with other code in the midst of its decorators.

    Each of these keeps what it decorates in its closure.
    """
    decorated = getattr(forward, "__wrapped__", None)
    own = None if decorated is None else _with_code(decorated, code)
    cells = tuple(CellType(own) if each.cell_contents is decorated else each for each in forward.__closure__ or ())
    used = code if own is None else forward.__code__
    made = FunctionType(used, forward.__globals__, forward.__name__, forward.__defaults__, cells)
    made.__kwdefaults__ = forward.__kwdefaults__
    update_wrapper(made, forward).__dict__.pop("__wrapped__")
    if own is not None:
        made.__dict__["__wrapped__"] = own
    return made
