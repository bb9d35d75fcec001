"""Attention over packed tokens as operators of a graph, and the calls that kernels' rules admit on them."""

from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph, Operator, Tensor
from autotuner.ir.packed_attention import BITS_OF_SEED, NUMBERS_PER_ROW
from autotuner.ir.records import Call, Candidate
from autotuner.kernels import KERNELS


def packed_graph(
    dtype: str, *, dropped: float = 0.0, shared: int = 4, cap: float = 0.0, rows: int = 300, bias: str = "",
    constant: bool = False,
) -> Graph:  # fmt: skip
    """Return forward and backward of one attention, of four heads of queries with eight features.

    Args:
        bias: axes of a relative bias of 41 distances; "" without one.
        constant: the bias gets no gradient.
    """
    extents = {"t": rows, "n": 4, "m": shared, "p": 8, "c": NUMBERS_PER_ROW, "z": BITS_OF_SEED, "d": 41}
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
    """Return the calls of a library's kernels that their rules admit."""
    found = []
    for operator in graph.operators:
        if operator.kind.startswith("packed_attention"):
            subgraph = graph.subgraph([operator], operator.inputs, operator.outputs)
            rule = KERNELS[f"{library}_{operator.kind}"]
            rows = (Candidate(rule.name, row) for row in dict.fromkeys(rule.layouts(subgraph)))
            found += [Call(subgraph, row) for row in rows if rule.refuses(subgraph, row) is None]
    return found
