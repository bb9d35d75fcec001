"""Programs for tests, and graphs of one operator that carries one."""

import json
from collections.abc import Sequence
from typing import Any

from autotuner.ir.graph import Graph, Operator, Tensor
from autotuner.ir.program import parse_program
from autotuner.kernels.torch.programs import differentiated

Call = tuple[Any, ...]


def written(calls: Sequence[Call], inputs: Sequence[Any], output: Any, *, saved: Sequence[int] | None = None) -> str:
    """Return the text of a program whose last call makes the result; what its gradient reads is found by tracing."""
    program = parse_program(json.dumps({
        "calls": [[name, list(arguments), keywords] for name, arguments, keywords in
                  ((*call, {})[:3] for call in calls)],
        "inputs": list(inputs), "output": list(output), "result": f"%{len(inputs) + len(calls) - 1}",
        "saved": list(saved or ()),
    }))  # fmt: skip
    return program.text if saved is not None else differentiated(program).text


def expression(calls: Sequence[Call], *dtypes: str, wanted: Sequence[int] | None = None, output: str = "") -> str:
    """Return the text of an expression over inputs of some types; the result has the first one's."""
    inputs = [[dtype, [], wanted is None or place in wanted] for place, dtype in enumerate(dtypes)]
    return written(calls, inputs, [output or dtypes[0], []])


def graph_of(kind: str, spec: str, text: str, extents: dict[str, int]) -> Graph:
    """Return a forward graph of one operator; its operands are inputs, and their axes those of the spec."""
    program = parse_program(text)
    left, right = spec.split("->")
    names = [f"x{place}" for place in range(len(program.inputs))]
    tensors = {
        name: Tensor(name, axes, each.dtype, "input", constant=not each.wanted)
        for name, axes, each in zip(names, left.split(","), program.inputs, strict=True)
    }
    tensors["y"] = Tensor("y", right, program.output[0], "activation")
    operator = Operator("y", kind, spec, tuple(names), ("y",), (("program", text),))
    return Graph("one", extents, tensors, (operator,), ("y",))
