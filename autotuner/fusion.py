"""Which operators one kernel may cover: single ones, library patterns, stacks of siblings, and connected sets.

A cover is convex: no path leaves it and comes back, so that it can run as one kernel.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autotuner.graph import Graph, Operator
from autotuner.kernels import KERNELS, Kernel
from autotuner.kernels.attention import ATTENTION, BACKWARD, DROPPING, FORWARD
from autotuner.kernels.cublaslt import sums_contracted_axes
from autotuner.kernels.fused import FUSIBLE

STACKING = ("torch", "cublas", "cublaslt")
"""First words of the names of kernels over stacked siblings."""

INDUCTOR_ALONE = ("layer_norm", "layer_norm_grad_input", "layer_norm_grad_parameters")

Boundary = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Cover:
    """Operators computed by one kernel, in an order in which they can run (siblings in the order of their stack), the
    boundary tensors, and the kernels that may do it.

    `recomputed` names forward operators that the kernel repeats inside rather than read what they made.
    """

    operators: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kernels: tuple[str, ...]
    recomputed: tuple[str, ...] = ()


@dataclass(frozen=True)
class StackGroup:
    """Sibling contractions of one input with parameters of one shape, e.g. query, key and value."""

    operators: tuple[Operator, ...]


class Reach:
    """Which operators depend on which, as bit sets over graph order."""

    def __init__(self, graph: Graph) -> None:
        self.index = {operator.name: i for i, operator in enumerate(graph.operators)}
        self.after = [0] * len(graph.operators)
        for i in range(len(graph.operators) - 1, -1, -1):
            for tensor in graph.operators[i].outputs:
                for consumer in graph.consumers[tensor]:
                    j = self.index[consumer.name]
                    self.after[i] |= self.after[j] | 1 << j
        self.before = [0] * len(graph.operators)
        for i, later in enumerate(self.after):
            for j in range(i + 1, len(self.after)):
                if later >> j & 1:
                    self.before[j] |= 1 << i

    def bits(self, operators: Iterable[Operator]) -> int:
        return sum(1 << self.index[operator.name] for operator in operators)

    def convex(self, operators: Collection[Operator]) -> bool:
        """Tell whether no path leaves the set and comes back."""
        members = self.bits(operators)
        below = above = 0
        for operator in operators:
            below |= self.after[self.index[operator.name]]
            above |= self.before[self.index[operator.name]]
        return not below & above & ~members

    def cyclic(self, one: Collection[Operator], other: Collection[Operator]) -> bool:
        """Tell whether two disjoint covers depend on each other."""
        first, second = self.bits(one), self.bits(other)
        after_first = after_second = 0
        for operator in one:
            after_first |= self.after[self.index[operator.name]]
        for operator in other:
            after_second |= self.after[self.index[operator.name]]
        return bool(after_first & second and after_second & first)


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
        for name, operators in _stacks(graph, group, reach):
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


def boundary(graph: Graph, operators: Collection[Operator]) -> Boundary:
    """Return what some operators read from outside and what they leave for others; optional tensors stay absent."""
    names = {operator.name for operator in operators}
    made = [tensor for operator in operators for tensor in operator.outputs]
    read = dict.fromkeys(t for o in operators for t in o.inputs if t not in made and not graph.tensors[t].optional)
    left = [
        t for t in made
        if not graph.tensors[t].optional
        and (t in graph.outputs or not graph.consumers[t] or any(c.name not in names for c in graph.consumers[t]))
    ]  # fmt: skip
    return tuple(read), tuple(left)


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
    follower = _only_consumer(graph, product.outputs[0])
    taking = 2 if kinds[0] == "add" else 1
    if follower and follower.kind == kinds[0] and product.outputs[0] in follower.inputs[:taking]:
        third = [(o,) for o in graph.consumers[follower.outputs[0]] if o.kind == kinds[-1]] if kinds[1:] else [()]
        yield from ((product, follower, *last) for last in third)


def _only_consumer(graph: Graph, tensor: str) -> Operator | None:
    consumers = graph.consumers[tensor]
    return consumers[0] if len(consumers) == 1 and tensor not in graph.outputs else None


def attention_forward(
    graph: Graph, kinds: tuple[str, ...] = FORWARD
) -> Iterator[tuple[tuple[Operator, ...], Boundary]]:
    """Yield scores, scale, a mask and dropout if `kinds` has them, softmax and context; weights stay inside.

    An added mask is the last input. A mask of dropped weights is among the outputs, for backward.
    """
    for softmax in graph.operators:
        if softmax.kind != "softmax" or len(softmax.outputs) != 2:
            continue
        weights, log_sum_exp = softmax.outputs
        ahead = _dropping(graph, weights) if DROPPING[-1] in kinds else ()
        read = ahead[-1].outputs[0] if ahead else weights
        context = next((o for o in graph.consumers[read] if o.phase == "forward" and o.inputs[0] == read), None)
        if context is None:
            continue
        chain = [softmax, *ahead, context]
        while len(chain) < len(kinds) and chain[0].inputs and chain[0].inputs[0] in graph.producers:
            chain.insert(0, graph.producers[chain[0].inputs[0]])
        if tuple(o.kind for o in chain) == kinds and _causal_of_queries(chain):
            added = (t for o in chain if o.kind == "mask" for t in o.inputs[1:])
            inputs = (*chain[0].inputs, context.inputs[1], *added)
            saved = any(o.phase == "backward" for o in graph.consumers[weights])
            masks = ahead[0].outputs if ahead else ()
            yield tuple(chain), (inputs, (context.outputs[0], log_sum_exp, *masks) if saved else context.outputs)


def _dropping(graph: Graph, weights: str) -> tuple[Operator, ...]:
    """Return what draws the mask of dropped weights, and what drops them; nothing where they are read otherwise."""
    forward = [o for o in graph.consumers[weights] if o.phase == "forward"]
    if len(forward) != 1 or forward[0].kind != "dropout":
        return ()
    return graph.producers[forward[0].inputs[1]], forward[0]


def _causal_of_queries(chain: Sequence[Operator]) -> bool:
    """Tell whether a causal mask, where attention has one, hides keys (which the softmax runs along) from queries."""
    softmax = next(operator for operator in chain if operator.kind == "softmax")
    scores, mask = chain[0], chain[list(chain).index(softmax) - 1]
    if mask.kind != "causal_mask":
        return True
    places = [mask.output_axes[0].index(str(mask.attribute(name))) for name in ("query_axis", "key_axis")]
    query, key = (scores.output_axes[0][place] for place in places)
    runs_along = softmax.input_axes[0].index(str(softmax.attribute("axis")))
    return places[1] == runs_along and query not in scores.input_axes[1] and key not in scores.input_axes[0]


def attention_grad(
    graph: Graph, kinds: tuple[str, ...] = FORWARD
) -> Iterator[tuple[tuple[Operator, ...], Boundary, tuple[Operator, ...]]]:
    """Yield the backward operators of the same attention, and the forward ones that make the weights again.

    The forward output, the log-sum-exp, a mask of dropped weights and an added one are read, the weights are not.
    """
    for chain, (inputs, outputs) in attention_forward(graph, kinds):
        if len(outputs) == 1:
            continue
        *made_again, context = chain
        query, key, value, *added = inputs
        softmax = next(o for o in chain if o.kind == "softmax")
        drawing = next((o for o in chain if o.kind == "dropout_mask"), None)
        again = [o for o in made_again if o is not drawing]
        weights, read = softmax.outputs[0], again[-1].outputs[0]
        grad_softmax = next((o for o in graph.consumers[weights] if o.kind == "softmax_grad"), None)
        above = graph.producers.get(grad_softmax.inputs[0]) if grad_softmax else None
        grad_drop = above if drawing and above and drawing.outputs[0] in above.inputs else None
        grad_weights = graph.producers.get(grad_drop.inputs[0]) if grad_drop else above
        grad_value = next((o for o in graph.consumers[read] if o.phase == "backward" and o.kind == "contraction"), None)
        grad_scale = _only_consumer(graph, grad_softmax.outputs[0]) if grad_softmax else None
        if not (grad_softmax and grad_weights and grad_value and grad_scale) or bool(drawing) != bool(grad_drop):
            continue
        last = [o for o in graph.consumers[grad_scale.outputs[0]] if o.kind == "contraction"]
        into_query = next((o for o in last if key in o.inputs), None)
        into_key = next((o for o in last if query in o.inputs), None)
        if not (into_query and into_key):
            continue
        dropped = (grad_drop,) if grad_drop else ()
        members = (grad_weights, grad_value, *dropped, grad_softmax, grad_scale, into_query, into_key)
        if sorted(o.kind for o in members) == sorted((*BACKWARD, *(o.kind for o in dropped))):
            gradient = next(t for t in grad_weights.inputs if t != value)
            made = (into_query.outputs[0], into_key.outputs[0], grad_value.outputs[0])
            read_again = (query, key, value, context.outputs[0], *outputs[1:], *added)
            yield members, ((gradient, *read_again), made), tuple(again)


def products_with_bias_grads(graph: Graph) -> Iterator[tuple[Operator, ...]]:
    """Yield a bias's gradient and a contraction that sums the same gradient over the same axes."""
    for bias in graph.operators:
        for product in graph.consumers[bias.inputs[0]] if bias.kind == "bias_grad" else ():
            if product.kind == "contraction" and product.inputs[0] != product.inputs[1]:
                pair = (bias, product)
                if sums_contracted_axes(graph.subgraph(pair, *boundary(graph, pair))):
                    yield pair


def stack_groups(graph: Graph) -> tuple[StackGroup, ...]:
    """Return siblings that can be stacked: the longest run of them first, then neighbours in pairs."""
    runs: dict[tuple[str, str, tuple[int, ...]], list[Operator]] = {}
    for operator in graph.operators:
        if operator.kind == "contraction" and operator.phase == "forward":
            weight = operator.inputs[1]
            if graph.tensors[weight].role == "parameter":
                runs.setdefault((operator.inputs[0], operator.spec, graph.shape(weight)), []).append(operator)
    groups: list[StackGroup] = []
    for run in runs.values():
        if len(run) > 1:
            groups.append(StackGroup(tuple(run)))
        if len(run) > 2:
            groups += [StackGroup(pair) for pair in pairwise(run)]
    return tuple(groups)


def stack_families(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Return tensors that are slices of one stack when they are stacked: products, biased products, their gradients,
    weights and weight gradients, biases and bias gradients; once per group of siblings."""
    families: list[tuple[str, ...]] = []
    for group in stack_groups(graph):
        products = tuple(operator.outputs[0] for operator in group.operators)
        weights = tuple(operator.inputs[1] for operator in group.operators)
        families += [products, weights]
        biases = _biases(graph, group)
        if biases:
            families += [tuple(o.outputs[0] for o in biases), tuple(o.inputs[1] for o in biases)]
        for family in list(families):
            gradients = tuple(f"grad_{name}" for name in family)
            if all(name in graph.tensors for name in gradients) and gradients not in families:
                families.append(gradients)
    return tuple(dict.fromkeys(families))


def _biases(graph: Graph, group: StackGroup) -> tuple[Operator, ...]:
    followers = [_only_consumer(graph, operator.outputs[0]) for operator in group.operators]
    biases = tuple(o for o in followers if o and o.kind == "bias")
    return biases if len(biases) == len(group.operators) else ()


def _stacks(graph: Graph, group: StackGroup, reach: Reach) -> Iterator[tuple[str, tuple[Operator, ...]]]:
    yield "stacked_matmul", group.operators
    biases = _biases(graph, group)
    if biases:
        yield "stacked_matmul_bias", (*group.operators, *biases)
        yield "stacked_bias", biases
    weights = [operator.inputs[1] for operator in group.operators]
    found: list[tuple[Operator, ...]] = []
    for names, kernel in (
        ([f"grad_{weight}" for weight in weights], "stacked_matmul"),
        ([f"grad_{bias.inputs[1]}" for bias in biases], "stacked_bias_grad"),
    ):
        makers = tuple(graph.producers[name] for name in names if name in graph.producers)
        if makers and len(makers) == len(weights):
            yield kernel, makers
            found.append(makers)
    if len(found) > 1:
        yield "stacked_matmul_bias_grad", found[0] + found[1]
    into_input = [next((o for o in graph.consumers[w] if o.phase == "backward" and o.kind == "contraction"), None)
                  for w in weights]  # fmt: skip
    if all(into_input):
        summed = _with_sums(graph, [o for o in into_input if o], reach)
        if summed:
            yield "stacked_matmul", summed


def _with_sums(graph: Graph, products: list[Operator], reach: Reach) -> tuple[Operator, ...] | None:
    """Add the sums that make one tensor of several products, with at most one addend from outside."""
    members = list(products)
    outside: set[str] = set()
    changed = True
    while changed:
        changed = False
        made = {tensor for operator in members for tensor in operator.outputs}
        for add in graph.operators:
            if add.kind != "add" or add in members or not made & set(add.inputs):
                continue
            others = outside | (set(add.inputs) - made)
            if len(others) <= 1 and reach.convex([*members, add]):
                members.append(add)
                outside = others
                changed = True
                break
    members[len(products) :] = sorted(members[len(products) :], key=lambda operator: reach.index[operator.name])
    _, left = boundary(graph, members)
    return tuple(members) if len(left) == 1 else None


def connected_sets(graph: Graph, reach: Reach, max_operators: int) -> Iterator[tuple[Operator, ...]]:
    """Yield the sets that the generic fused kernel is tried on, few enough to compile them all.

    Each is a largest connected convex set of element-wise and normalisation operators of one phase; and what is left
    of it without the bias behind a product (which the product's own kernel can add) and without the gradients of
    parameters (whose sums run along another axis).
    """
    seen: set[frozenset[str]] = set()
    drops: tuple[Callable[[Operator], bool], ...] = (
        lambda _: False,
        lambda o: o.kind == "bias",
        lambda o: o.kind in ("bias_grad", "layer_norm_grad_parameters"),
    )
    for drop in drops:
        for operators in _grow(graph, reach, max_operators, drop):
            names = frozenset(operator.name for operator in operators)
            if names not in seen and (len(operators) > 1 or operators[0].kind in INDUCTOR_ALONE):
                seen.add(names)
                yield operators
    for operator in graph.operators:
        if operator.kind in INDUCTOR_ALONE and frozenset([operator.name]) not in seen:
            yield (operator,)


def _grow(
    graph: Graph, reach: Reach, max_operators: int, drop: Callable[[Operator], bool]
) -> Iterator[tuple[Operator, ...]]:
    """Yield disjoint sets, grown in graph order along tensors that one member makes or several read."""
    free = [operator for operator in graph.operators if operator.kind in FUSIBLE and not drop(operator)]
    taken: set[str] = set()
    for seed in free:
        if seed.name in taken:
            continue
        members = [seed]
        taken.add(seed.name)
        changed = True
        while changed and len(members) < max_operators:
            changed = False
            touched = {t for o in members for t in o.outputs} | {
                t for o in members for t in o.inputs if graph.tensors[t].role == "gradient"
            }
            for operator in free:
                if operator.name in taken or operator.phase != seed.phase or not touched & set(operator.inputs):
                    continue
                if reach.convex([*members, operator]):
                    members.append(operator)
                    taken.add(operator.name)
                    changed = True
                    break
        yield tuple(sorted(members, key=lambda operator: reach.index[operator.name]))
