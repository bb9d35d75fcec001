"""LayerDrop of transformers' models, with a probability of 0: no number is drawn for it.

Up to version 5.17 at least, and no longer in 5.23, encoders and decoders draw one on the host for each layer, and
compare it with the probability, which is 0 by default. Dynamo cuts the graph at each of these decisions, and a step
that draws on the host is not captured. So the forward of their classes is written anew, with one change: the number is
drawn where it is compared, and only for a probability above 0. (A mode of torch functions would be simpler. Dynamo of
torch 2.11 looks for none where a tensor is made.)
"""

import __future__

import ast
import re
from functools import cache, update_wrapper
from inspect import getsource, unwrap
from types import CellType, CodeType, FunctionType
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

    Their classes compute what they did, those of other models too, and draw for a probability above 0. The generator on
    the host, which they moved on for each layer, stays as it is.
    """
    own = getattr(model, "_orig_mod", model)
    for module in own.modules() if isinstance(own, nn.Module) else ():
        probability = getattr(module, "layerdrop", getattr(getattr(module, "config", None), "layerdrop", None))
        if probability == 0:
            owner: Any = next(each for each in type(module).__mro__ if "forward" in vars(each))
            late = _drawing_late(owner.forward)
            if late is not owner.forward:
                owner.forward = late


@cache
def _drawing_late(forward: Any) -> Any:
    """Return a function that draws numbers late, or the same one: it draws none, or does more with them than to
    compare each once, or cannot be written anew."""
    drawn = unwrap(forward)
    try:
        source = getsource(drawn)
    except (OSError, TypeError):
        return forward
    names, uses = _DRAWN.findall(source), 0
    for name in set(names):
        compared = len(re.findall(rf"\b{name} < self\.(?:config\.)?layerdrop\b", source))
        uses += len(re.findall(rf"\b{name}\b", source)) if compared == names.count(name) else 0
    is_known = names and uses == 2 * len(names) and source.count("torch.rand(") == len(names)
    if not is_known or "layerdrop > 0" in source or not isinstance(drawn, FunctionType) or drawn.__closure__:
        return forward
    try:
        return _with_code(forward, _code_drawing_late(drawn, source, set(names)))
    except (SyntaxError, ValueError):  # of a source that is not what runs, or of decorators of other kinds
        return forward


def _code_drawing_late(drawn: FunctionType, source: str, names: set[str]) -> CodeType:
    """Return the code of a function that draws numbers of these names late.

    Raises:
        SyntaxError: the source is none.
        ValueError: it is that of another function, or reads private names of a class.
    """
    written = ast.parse("if True:\n" + source if source[0].isspace() else source)
    function = next(each for each in ast.walk(written) if isinstance(each, ast.FunctionDef))
    function.decorator_list = []
    begin = drawn.__code__.co_firstlineno - (2 if source[0].isspace() else 1)
    ast.increment_lineno(_DrawnLate(names).visit(written), begin)
    path, flags = drawn.__code__.co_filename, __future__.annotations.compiler_flag  # by which they are text
    compiled = compile(ast.fix_missing_locations(written), path, "exec", flags)
    found = [each for each in compiled.co_consts if isinstance(each, CodeType) and each.co_name == drawn.__name__]
    if len(found) != 1 or not {*drawn.__code__.co_names} <= {*found[0].co_names} <= {*drawn.__code__.co_names, "bool"}:
        raise ValueError(f"the source of {drawn.__qualname__} is not what it runs")
    return found[0]


def _with_code(forward: Any, code: CodeType) -> FunctionType:
    """Return a function with other code, or, if it is decorated, with other code in the midst of its decorators.

    Each of these keeps what it decorates in its closure.

    Raises:
        ValueError: one does not, or is no function.
    """
    decorated = getattr(forward, "__wrapped__", None)
    cells = () if not isinstance(forward, FunctionType) else forward.__closure__ or ()
    kept = [decorated is not None and each.cell_contents is decorated for each in cells]
    if not isinstance(forward, FunctionType) or sum(kept) != (decorated is not None):
        raise ValueError(f"{forward} does not keep what it decorates in its closure")
    own = None if decorated is None else _with_code(decorated, code)
    name = f"{forward.__code__.co_name}_drawing_late"  # dynamo keeps with a code what it found of it
    used = code if own is None else forward.__code__.replace(co_name=name)
    closure = tuple(CellType(own) if is_kept else each for each, is_kept in zip(cells, kept, strict=True))
    made = FunctionType(used, forward.__globals__, forward.__name__, forward.__defaults__, closure)
    made.__kwdefaults__ = forward.__kwdefaults__
    update_wrapper(made, forward).__dict__.pop("__wrapped__")
    if own is not None:
        made.__dict__["__wrapped__"] = own
    return made
