"""Attention over packed tokens as operators of a graph, and the calls that kernels' rules admit on them."""

from collections.abc import Sequence

from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph, Operator, Tensor
from autotuner.ir.packed_attention import BITS_OF_SEED, NUMBERS_PER_ROW
from autotuner.ir.records import Attributes, Call, Candidate
from autotuner.kernels import KERNELS
from autotuner.space import space_file
from autotuner.space.choices import multiplied

SPACE = space_file("cuda")


def packed_graph(
    dtype: str, *, dropped: float = 0.0, shared: int = 4, cap: float = 0.0, rows: int = 300, bias: str = "",
    constant: bool = False, features: int = 8,
) -> Graph:  # fmt: skip
    """Return forward and backward of one attention, of four heads of queries.

    Args:
        bias: axes of a relative bias of 41 distances; "" without one.
        constant: the bias gets no gradient.
    """
    extents = {"t": rows, "n": 4, "m": shared, "p": features, "c": NUMBERS_PER_ROW, "z": BITS_OF_SEED, "d": 41}
    own = "tnp" if shared == 4 else "tmp"
    attributes = (("row_axis", "t"), ("feature_axis", "p"), ("factor", 0.3), ("dropped", dropped), ("cap", cap))
    operands = {"query": "tnp", "key": own, "value": own}
    tensors = {name: Tensor(name, axes, dtype, "input") for name, axes in operands.items()}
    tensors["bounds"] = Tensor("bounds", "tc", "float32", "input", constant=True)
    tensors["y"] = Tensor("y", "tnp", dtype, "activation")
    statistic = "float64" if dtype == "float64" else "float32"
    tensors["sums"] = Tensor("sums", "nt", statistic, "auxiliary")
    names, spec = [*operands, "bounds"], f"tnp,{own},{own},tc"
    operators = []
    if dropped:
        tensors["seed"] = Tensor("seed", "z", dtype, "auxiliary")
        operators.append(Operator("seed", "dropout_mask", "->z", (), ("seed",), (("p", 0.5),)))
        names, spec = [*names, "seed"], f"{spec},z"
    if bias:
        tensors["bias"] = Tensor("bias", bias, statistic, "input", constant=constant)
        names, spec = [*names, "bias"], f"{spec},{bias}"
    operators.append(Operator("y", "packed_attention", f"{spec}->tnp,nt", tuple(names), ("y", "sums"), attributes))
    return training_graph(Graph("packed", extents, tensors, tuple(operators), ("y",)))


def calls_of(graph: Graph, library: str) -> list[Call]:
    """Return the calls of a library's kernels that their rules admit, without parameters."""
    return [call for kind in kinds_of(graph) for call in _admitted(graph, f"{library}_{kind}", [()])]


def tuned_calls_of(graph: Graph, kind: str) -> list[Call]:
    """Return the calls of the Triton kernel of a kind with all parameters that a CUDA device's search space has, in one
    layout."""
    kernel = f"triton_{kind}"
    lists = tuple((name, tuple(values)) for name, values in SPACE.kernels[kernel].params.items())
    found = _admitted(graph, kernel, list(multiplied(lists)))
    return [call for call in found if call.candidate.forms == found[0].candidate.forms]


def kinds_of(graph: Graph) -> list[str]:
    """Return the kinds of the operators of attention in a graph."""
    return [operator.kind for operator in graph.operators if operator.kind.startswith("packed_attention")]


def _admitted(graph: Graph, kernel: str, params: Sequence[Attributes]) -> list[Call]:
    """Return the calls of a kernel with any of some parameters, as far as its rule admits them."""
    rule = KERNELS[kernel]
    (operator,) = (each for each in graph.operators if each.kind == rule.covers[0])
    subgraph = graph.subgraph([operator], operator.inputs, operator.outputs)
    rows = dict.fromkeys(rule.layouts(subgraph))
    candidates = (Candidate(kernel, row, each) for row in rows for each in params)
    return [Call(subgraph, each) for each in candidates if rule.refuses(subgraph, each) is None]
