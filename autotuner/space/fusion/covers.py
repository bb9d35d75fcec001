"""Every cover of a graph: what each kernel's own list of kinds matches, and the sets found elsewhere in this room."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from autotuner.checkpoint import checkpoint
from autotuner.ir.graph import Graph, Operator
from autotuner.kernels import KERNELS, Kernel
from autotuner.kernels.rules.attention import ATTENTION
from autotuner.kernels.rules.cublaslt import sums_contracted_axes
from autotuner.space.fusion.attention import attention_forward, attention_grad
from autotuner.space.fusion.connected import connected_sets
from autotuner.space.fusion.cover import Boundary, Cover, Reach, boundary, only_consumer
from autotuner.space.fusion.stacks import stack_groups, stacks

STACKING = ("torch", "cublas", "cublaslt")
"""First words of the names of kernels over stacked siblings."""


def covers(graph: Graph, kernels: Collection[str], max_operators: int = 8) -> tuple[Cover, ...]:
    """Return every cover of the graph that one of the named kernels may run.

    Args:
        graph: a forward or training graph.
        kernels: names of registered kernels, as a search space lists them.
        max_operators: the largest connected set given to the generic fused kernel.
    """
    enabled = [kernel for kernel in KERNELS if kernel.name in kernels]
    reach = Reach(graph)
    found: dict[Cover, list[str]] = {}

    def add(operators: Collection[Operator], kernel: str, edge: Boundary, again: Iterable[Operator] = ()) -> None:
        checkpoint()
        if reach.convex(operators):
            names = tuple(operator.name for operator in operators)
            cover = Cover(names, *edge, kernels=(), recomputed=tuple(operator.name for operator in again))
            found.setdefault(cover, []).append(kernel)

    for kernel in enabled:
        for operators in _pattern(graph, kernel):
            add(operators, kernel.name, boundary(graph, operators))
    for name, patterns in ATTENTION.items():
        if name in kernels and f"{name}_grad" in kernels:
            for kinds in patterns:
                for operators, edge in attention_forward(graph, kinds):
                    add(operators, name, edge)
                for operators, edge, again in attention_grad(graph, kinds):
                    add(operators, f"{name}_grad", edge, again)
    for group in stack_groups(graph):
        for name, operators in stacks(graph, group, reach):
            for kernel_name in (f"{library}_{name}" for library in STACKING):
                if kernel_name in kernels:
                    add(operators, kernel_name, boundary(graph, operators))
    if "cublaslt_matmul_bias_grad" in kernels:
        for operators in products_with_bias_grads(graph):
            add(operators, "cublaslt_matmul_bias_grad", boundary(graph, operators))
    if "inductor" in kernels:
        for operators in connected_sets(graph, reach, max_operators):
            add(operators, "inductor", boundary(graph, operators))
    return tuple(replace(cover, kernels=tuple(dict.fromkeys(names))) for cover, names in found.items())


def _pattern(graph: Graph, kernel: Kernel) -> Iterator[tuple[Operator, ...]]:
    """Yield the operators that a kernel's list of kinds matches: single ones, chains behind a product, and siblings."""
    for first in graph.operators if kernel.covers else ():
        if first.kind != kernel.covers[0]:
            continue
        if len(kernel.covers) == 1:
            yield (first,)
        elif first.kind == "contraction":
            yield from _behind_product(graph, first, kernel.covers[1:])
        else:
            siblings = (o for t in first.inputs[:2] for o in graph.consumers[t] if o.kind == kernel.covers[1])
            yield from ((first, s) for s in dict.fromkeys(siblings) if s.inputs[:2] == first.inputs[:2])


def _behind_product(graph: Graph, product: Operator, kinds: Sequence[str]) -> Iterator[tuple[Operator, ...]]:
    """Yield a product and the operator that alone reads it; for a third kind, one that reads what this makes."""
    follower = only_consumer(graph, product.outputs[0])
    taking = 2 if kinds[0] == "add" else 1
    if follower and follower.kind == kinds[0] and product.outputs[0] in follower.inputs[:taking]:
        third = [(o,) for o in graph.consumers[follower.outputs[0]] if o.kind == kinds[-1]] if kinds[1:] else [()]
        yield from ((product, follower, *last) for last in third)


def products_with_bias_grads(graph: Graph) -> Iterator[tuple[Operator, ...]]:
    """Yield a bias's gradient and a contraction that sums the same gradient over the same axes."""
    for bias in graph.operators:
        for product in graph.consumers[bias.inputs[0]] if bias.kind == "bias_grad" else ():
            if product.kind == "contraction" and product.inputs[0] != product.inputs[1]:
                pair = (bias, product)
                if sums_contracted_axes(graph.subgraph(pair, *boundary(graph, pair))):
                    yield pair
