"""Attention by cuDNN through its own front end: every operand where and as it lies, nothing is copied.

The mask of dropped weights is drawn from a seed of ours, which comes from torch's generator; the offset is 0.

Source:
    cuDNN frontend documentation, operations/Attention (sdpa, sdpa_backward).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autotuner.errors import KernelError
from autotuner.ir.records import Call, Subgraph
from autotuner.kernels.rules.attention import dropped_share
from autotuner.kernels.torch.attention import (
    backward_operands,
    backward_outputs,
    causal,
    factor,
    forward_operands,
    forward_output,
)

Run = Callable[[], Any]

SEEDS = 1 << 62


@dataclass(frozen=True)
class Operand:
    """An operand as the library is told of it: batch, heads, rows, features."""

    dtype: torch.dtype
    extents: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Operand":
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


@dataclass(frozen=True)
class Wanted:
    """An attention, forward or backward, less its pointers.

    Args:
        operands: by the library's names, those that it reads and those that it writes.
    """

    operands: tuple[tuple[str, Operand], ...]
    backward: bool
    dropped: float
    causal: bool
    factor: float
    device_index: int


def forward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """softmax(factor * query key^T), dropped or not, times value; the log-sum-exp, and the seed of the mask."""
    subgraph = call.subgraph
    query, key, value = forward_operands(subgraph, inputs)
    operands = {"q": query, "k": key, "v": value, "o": forward_output(subgraph, outputs[0])}
    if len(outputs) > 1:
        operands["stats"] = outputs[1].view(*query.shape[:3], 1)
    seed = outputs[2] if len(outputs) > 2 else None
    return _launched(subgraph, operands, seed, backward=False, draws=seed is not None)


def backward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Gradients of query, key and value; the boundary is that of `attention_flash.backward`."""
    names = ("dO", "q", "k", "v", "o")
    operands = dict(zip(names, backward_operands(call.subgraph, inputs), strict=True))
    operands["stats"] = inputs[5].view(*operands["q"].shape[:3], 1)
    operands |= zip(("dQ", "dK", "dV"), backward_outputs(call.subgraph, outputs), strict=True)
    return _launched(call.subgraph, operands, inputs[6] if len(inputs) > 6 else None, backward=True, draws=False)


def _launched(
    subgraph: Subgraph, operands: Mapping[str, Tensor], seed: Tensor | None, *, backward: bool, draws: bool
) -> Run:
    device = operands["q"].device
    wanted = Wanted(
        tuple((name, Operand.of(tensor)) for name, tensor in operands.items()), backward, dropped_share(subgraph),
        causal(subgraph), factor(subgraph), device.index or 0,
    )  # fmt: skip
    built = _built(wanted, seeded=seed is not None)
    library, handle = _handle(wanted.device_index)
    pointers = {built.named[name]: tensor.data_ptr() for name, tensor in operands.items()}
    if seed is not None:
        pointers |= {built.named["seed"]: seed.data_ptr(), built.named["offset"]: _zero(device).data_ptr()}

    def run() -> None:
        if draws:
            assert seed is not None
            seed.random_(0, SEEDS)
        workspace = torch.empty(built.workspace_bytes, dtype=torch.uint8, device=device)
        library.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        built.graph.execute(pointers, workspace.data_ptr(), handle=handle)

    return run


@cache
def _zero(device: torch.device) -> Tensor:
    """Return the offset of all masks, which stays for as long as the process."""
    return torch.zeros(1, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Built:
    """A graph of the library with its plan, and its tensors by name."""

    graph: Any
    named: Mapping[str, Any]
    workspace_bytes: int


@cache
def _handle(device_index: int) -> tuple[Any, Any]:
    """Return the library and a handle of it on a device.

    Raises:
        KernelError: its front end is not installed.
    """
    try:
        import cudnn
    except ImportError as error:
        raise KernelError(
            f"cuDNN is reached through nvidia-cudnn-frontend, which cannot be imported: {error}"
        ) from None
    with torch.cuda.device(device_index):
        return cudnn, cudnn.create_handle()


@cache
def _built(wanted: Wanted, *, seeded: bool) -> Built:
    """Return the plan of an attention; one for all operands that lie so.

    Raises:
        KernelError: the library does not compute it.
    """
    library, handle = _handle(wanted.device_index)
    kinds = {
        torch.bfloat16: library.data_type.BFLOAT16,
        torch.float16: library.data_type.HALF,
        torch.float32: library.data_type.FLOAT,
    }
    lies = dict(wanted.operands)
    graph = library.pygraph(
        io_data_type=kinds[lies["q"].dtype],
        intermediate_data_type=library.data_type.FLOAT,
        compute_data_type=library.data_type.FLOAT,
        handle=handle,
    )
    read = ("q", "k", "v", "o", "dO", "stats") if wanted.backward else ("q", "k", "v")
    named = {
        name: graph.tensor(
            name=name, dim=list(lies[name].extents), stride=list(lies[name].strides), data_type=kinds[lies[name].dtype]
        )
        for name in read
    }
    options: dict[str, Any] = {"attn_scale": wanted.factor, "use_causal_mask": wanted.causal}
    if seeded:
        ones = {"dim": [1] * 4, "stride": [1] * 4, "data_type": library.data_type.INT64}
        named |= {name: graph.tensor(name=name, **ones) for name in ("seed", "offset")}
        options["dropout"] = (wanted.dropped, named["seed"], named["offset"])
    if wanted.backward:
        made = dict(zip(("dQ", "dK", "dV"), graph.sdpa_backward(
            name="backward", q=named["q"], k=named["k"], v=named["v"], o=named["o"], dO=named["dO"],
            stats=named["stats"], **options,
        ), strict=True))  # fmt: skip
    else:
        saved = "stats" in lies
        out, stats = graph.sdpa(
            name="forward", q=named["q"], k=named["k"], v=named["v"], generate_stats=saved, **options
        )
        made = {"o": out} | ({"stats": stats} if saved else {})
    for name, tensor in made.items():
        tensor.set_output(True).set_dim(list(lies[name].extents)).set_stride(list(lies[name].strides))
        tensor.set_data_type(kinds[lies[name].dtype])
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([library.heur_mode.A, library.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
    except (library.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        raise KernelError(f"cuDNN does not compute this attention: {error}") from None
    return Built(graph, named | made, max(1, graph.get_workspace_size()))
