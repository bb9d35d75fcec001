"""Inductor on a subgraph: the reference is traced on the operands as they lie, and compiled to write its outputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autotuner.ir.records import Call
from autotuner.kernels.reference import evaluate


def fused(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Compile, or fetch from the compiler's cache on disk, the whole subgraph as it lies."""
    count = len(inputs)

    def body(*operands: Tensor) -> tuple[()]:
        made = evaluate(call.subgraph, operands[:count])
        for target, value in zip(operands[count:], made, strict=True):
            if value is not None:
                target.copy_(value)
        return ()

    compiled = compiled_for(call.key, body, (*inputs, *outputs))
    operands = (*inputs, *outputs)
    return lambda: compiled(list(operands))


_COMPILED: dict[str, Callable[[list[Tensor]], Any]] = {}


def compiled_for(key: str, body: Callable[..., Any], operands: Sequence[Tensor]) -> Callable[[list[Tensor]], Any]:
    """Return the compiled body for operands of these shapes and strides; one compilation per call key and process.

    Inductor keeps what it made on disk, by the traced graph, and loads it in other processes. It does so only where the
    mode has an environment of shapes, which these static shapes do not need otherwise.
    """
    if key not in _COMPILED:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in operands]
        with torch.no_grad(), mode:
            traced = make_fx(body, decomposition_table=select_decomp_table())(*fakes)
        with torch.no_grad(), config.patch(size_asserts=False), tracing(TracingContext(mode)):
            _COMPILED[key] = compile_fx_inner(traced, fakes)
    return _COMPILED[key]
