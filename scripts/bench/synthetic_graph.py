"""The operators of a made-up training step: a block, repeated, and its backward; see `synthetic`."""

from collections import defaultdict
from dataclasses import dataclass

from autotuner.errors import ProblemError

KINDS = ("linear", "matmul", "softmax", "gelu", "dropout", "bias", "add", "norm")


@dataclass(frozen=True, slots=True)
class Step:
    """A forward operator of a block; its output has its name.

    Args:
        kind: one of `KINDS`; `linear` has a weight, `dropout` also makes a mask, `norm` statistics.
        inputs: earlier steps of the block, or `x` for what the block before made.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """The block that is repeated, and the sets of its operators, forward and backward, that one kernel may compute.

    The operator that makes a step's gradient is `grad_<step>`; of a weight or bias, `grad_<step>_weight`; of a product
    of two tensors, `grad_<step>_left` and `grad_<step>_right`.
    """

    steps: tuple[Step, ...]
    covers: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        known = {"x"}
        for step in self.steps:
            if step.kind not in KINDS:
                raise ProblemError(f"step {step.name!r} is of kind {step.kind!r}; known: {', '.join(KINDS)}")
            if not known.issuperset(step.inputs):
                raise ProblemError(f"step {step.name!r} reads {step.inputs}; before it there are: {sorted(known)}")
            known.add(step.name)


def _steps(text: str) -> tuple[Step, ...]:
    parts = [line.split() for line in text.strip().splitlines()]
    return tuple(Step(name, kind, tuple(inputs)) for name, kind, *inputs in parts)


ENCODER = Block(
    _steps("""
    query linear x
    key linear x
    value linear x
    scores matmul query key
    weights softmax scores
    dropped_weights dropout weights
    context matmul dropped_weights value
    output linear context
    output_biased bias output
    output_dropped dropout output_biased
    attended add output_dropped x
    normed norm attended
    hidden linear normed
    hidden_biased bias hidden
    active gelu hidden_biased
    active_dropped dropout active
    result linear active_dropped
    result_biased bias result
    result_dropped dropout result_biased
    summed add result_dropped normed
    y norm summed
    """),
    (
        ("query", "key", "value"),
        ("query", "key"),
        ("weights", "dropped_weights"),
        ("scores", "weights", "dropped_weights", "context"),
        ("output", "output_biased"),
        ("output_biased", "output_dropped", "attended", "normed"),
        ("output_biased", "output_dropped", "attended"),
        ("attended", "normed"),
        ("hidden", "hidden_biased"),
        ("hidden_biased", "active", "active_dropped"),
        ("active", "active_dropped"),
        ("result", "result_biased"),
        ("result_biased", "result_dropped", "summed", "y"),
        ("result_dropped", "summed"),
        ("grad_y", "grad_result_dropped"),
        ("grad_y", "grad_result_dropped", "grad_result_biased_weight"),
        ("grad_active_dropped", "grad_active"),
        ("grad_active_dropped", "grad_active", "grad_hidden_biased_weight"),
        ("grad_normed", "grad_output_dropped"),
        ("grad_normed", "grad_output_dropped", "grad_output_biased_weight"),
        ("grad_dropped_weights", "grad_weights"),
        ("grad_query_weight", "grad_key_weight", "grad_value_weight"),
    ),
)


@dataclass(frozen=True, slots=True)
class Node:
    """An operator with its weight, saved tensors and gradient among its inputs; its main output comes first."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class TrainingGraph:
    """The training graph of the first `count` steps of a repeated block, names prefixed by the repetition's number.

    Attributes:
        nodes: forward in order, then backward in order.
        given: tensors from outside that exist in their first form only.
        weights: tensors from outside that may exist in any form, and the gradient of each.
        single: tensors with one form.
        saved: tensors of forward that backward reads, weights left out.
        covers: nodes that one kernel may compute, where all of them are there.
    """

    def __init__(self, block: Block, count: int) -> None:
        self.nodes: list[Node] = []
        self.given = {"x"}
        self.weights: dict[str, str] = {}
        self.single: set[str] = set()
        self._parts: dict[str, list[str]] = defaultdict(list)
        size = len(block.steps)
        for place in range(count):
            number, step = place // size, block.steps[place % size]
            source = f"{number - 1}.{block.steps[-1].name}" if number else "x"
            self._forward(step, f"{number}.", [source if name == "x" else f"{number}.{name}" for name in step.inputs])
        self.forward = tuple(self.nodes)
        for node in reversed(self.forward):
            self._backward(node)
        self._gradient("x")
        names = {node.name for node in self.nodes}
        self.covers = [
            cover
            for number in range(-(-count // size))
            for cover in (tuple(f"{number}.{name}" for name in members) for members in block.covers)
            if names.issuperset(cover)
        ]
        self.makers = {tensor: node.name for node in self.nodes for tensor in node.outputs}
        self.readers: dict[str, list[str]] = defaultdict(list)
        for node in self.nodes:
            for tensor in node.inputs:
                self.readers[tensor].append(node.name)
        forward = {node.name for node in self.forward}
        self.saved = {
            tensor
            for tensor, readers in self.readers.items()
            if not forward.issuperset(readers) and (tensor == "x" or self.makers.get(tensor) in forward)
        }

    def _forward(self, step: Step, prefix: str, inputs: list[str]) -> None:
        name = prefix + step.name
        extra = {"dropout": (f"{name}_mask",), "norm": (f"{name}_statistics",)}.get(step.kind, ())
        if step.kind == "norm":
            self.single.update(extra)
        if step.kind == "linear":
            inputs.append(f"{name}_weight")
            self.weights[f"{name}_weight"] = f"{prefix}grad_{step.name}_weight"
        self.nodes.append(Node(name, step.kind, tuple(inputs), (name, *extra)))

    def _gradient(self, tensor: str) -> str:
        """Return the gradient of a tensor: its parts added up, or one from outside where it has none."""
        parts = self._parts[tensor]
        if not parts:
            self.given.add(f"grad of {tensor}")
            return f"grad of {tensor}"
        total = parts[0]
        for number, part in enumerate(parts[1:]):
            name = f"sum{number} of {tensor}"
            self.nodes.append(Node(name, "add", (total, part), (name,)))
            total = name
        return total

    def _backward(self, node: Node) -> None:
        gradient = self._gradient(node.name)
        prefix, _, step = node.name.partition(".")
        name = f"{prefix}.grad_{step}"

        def add(kind: str, made: str, *saved: str) -> str:
            self.nodes.append(Node(made, kind, (gradient, *saved), (made,)))
            return made

        first, *others = node.inputs
        if node.kind == "linear":
            self._parts[first].append(add("linear", name, others[0]))
            add("linear", f"{name}_weight", first)
        elif node.kind == "matmul":
            self._parts[first].append(add("matmul", f"{name}_left", others[0]))
            self._parts[others[0]].append(add("matmul", f"{name}_right", first))
        elif node.kind in ("add", "bias"):  # hands its gradient on unchanged
            for tensor in node.inputs:
                self._parts[tensor].append(gradient)
            if node.kind == "bias":
                self.single.add(add("bias", f"{name}_weight"))
        else:
            saved = {"softmax": node.outputs, "gelu": node.inputs, "dropout": node.outputs[1:]}
            default = (*node.inputs, *node.outputs[1:])
            self._parts[first].append(add(node.kind, name, *saved.get(node.kind, default)))
