"""Inductor on a subgraph: the reference is traced on the operands as they lie, and compiled to write its outputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autotuner.ir.formats import BITS
from autotuner.ir.records import Call
from autotuner.kernels.inductor.whole_bytes import BytesSeen, by_whole_bytes
from autotuner.kernels.reference import evaluate
from autotuner.kernels.torch.formats import decoded, encoded

Compiled = Callable[[list[Tensor]], Any]


def fused(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Compile, or fetch from the compiler's cache on disk, the whole subgraph as it lies."""
    operands = (*inputs, *outputs)
    run = compiled_for(call.key, written_outputs(call, len(inputs)), operands)
    return lambda: run(list(operands))


def written_outputs(call: Call, count: int) -> Callable[..., tuple[()]]:
    """Return a function of `count` inputs and the outputs, which computes a subgraph and copies results into these.

    What is stored in a flat format is decoded before the operators, and encoded behind them.
    """
    forms = call.candidate.parsed_forms()
    seen = by_whole_bytes(call.subgraph, forms) if any(form.is_flat for form in forms) else None
    if seen is None:
        seen = BytesSeen(call.subgraph, forms, (None,) * len(forms))
    tensors = [seen.subgraph.tensors[number] for number in seen.subgraph.boundary]
    stored = list(zip(seen.forms, tensors, strict=True))

    def body(*operands: Tensor) -> tuple[()]:
        viewed = [
            operand if place is None else operand.unflatten(place, (-1, BITS))  # type: ignore[no-untyped-call]
            for operand, place in zip(operands, seen.places, strict=True)
        ]
        read = [
            decoded(operand, form, tensor, None) if form.is_flat else operand
            for operand, (form, tensor) in zip(viewed[:count], stored, strict=False)
        ]
        made = evaluate(seen.subgraph, read)
        for target, value, (form, tensor) in zip(viewed[count:], made, stored[count:], strict=True):
            if value is not None:
                target.copy_(encoded(value, form, tensor) if form.is_flat else value)
        return ()

    return body


_COMPILED: dict[str, Compiled] = {}


def compiled_for(key: str, body: Callable[..., Any], operands: Sequence[Tensor]) -> Compiled:
    """Return the compiled body for operands of these shapes and strides; one compilation per call key and process."""
    if key not in _COMPILED:
        _COMPILED[key] = compiled(*traced(body, operands))
    return _COMPILED[key]


def traced(body: Callable[..., Any], operands: Sequence[Tensor]) -> tuple[fx.GraphModule, list[Tensor], FakeTensorMode]:
    """Return a body's calls, decomposed as Inductor wants them, operands without memory, and the mode of these.

    Inductor keeps what it made on disk, by the traced graph, and loads it in other processes. It does so only where the
    mode has an environment of shapes, which these static shapes do not need otherwise.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes: list[Tensor] = [mode.from_tensor(tensor, static_shapes=True) for tensor in operands]
    with torch.no_grad(), mode:
        return make_fx(body, decomposition_table=select_decomp_table())(*fakes), fakes, mode


def compiled(module: fx.GraphModule, fakes: Sequence[Tensor], mode: FakeTensorMode) -> Compiled:
    """Compile traced calls."""
    with torch.no_grad(), config.patch(size_asserts=False), tracing(TracingContext(mode)):
        made: Compiled = compile_fx_inner(module, list(fakes))
    return made
