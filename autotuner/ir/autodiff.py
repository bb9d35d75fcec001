"""Reverse-mode differentiation of a forward graph, by the gradient that each operator kind declares.

Gradients are tensors `grad_<tensor>`. Where an operator hands its gradient on unchanged (the input of a bias, both
inputs of an add), no operator stands for it: one gradient tensor serves both.
"""

from collections import Counter
from collections.abc import Mapping

from autotuner.errors import GraphError
from autotuner.ir.derivatives import Derivative, Gradient, HandedOn, of_normalised
from autotuner.ir.graph import Graph, Operator, Tensor
from autotuner.ir.kinds import KINDS
from autotuner.ir.operator_checks import check_operator, check_sizes, check_types

NORMS = frozenset({"layer_norm", "rms_norm"})
NARROW = frozenset({"bfloat16", "float16"})
UNREAD = frozenset({"add", "bias", "cast", "dropout", "scale"})
"""Kinds whose gradients do not read what they read first."""


def training_graph(forward: Graph) -> Graph:
    """Return forward and backward as one graph.

    Its outputs are those of forward, then the gradients of the inputs that a gradient reaches (an additive mask is a
    constant), then those of all parameters. The gradients of forward's outputs are given from outside. No operator is
    derived whose results are gradients of constants only.

    Where products are in 16 bits and a norm is in float32, as under autocast, the norm leaves for backward what it has
    normalised, in the type of the products, and not its input; see `norms_that_keep`.

    Where gradients meet, they are summed by binary `add` operators (running sum, next term). Contractions come last,
    each right before the `add` of its product, so that a kernel can add into the running sum.

    Raises:
        GraphError: an operator kind without a rule, a parameter that no gradient reaches, an output that is made of
            constants only, or a gradient that arrives where it cannot go on: at a statistic, at a mask, or straight
            from an output at an input.
    """
    for operator in forward.operators:
        gradient_of(operator)
        check_operator(operator)
        check_sizes(operator, forward.letters(operator))
        check_types(operator, lambda name: forward.tensors[name].dtype)
    backward = _derived(forward)
    for name in _without_gradient(forward, backward):
        raise GraphError(f"parameter {name!r} reaches none of the outputs {list(forward.outputs)}")
    sources = [t for role in ("input", "parameter") for t in forward.tensors.values() if t.role == role]
    return Graph(
        name=forward.name,
        extents=forward.extents,
        tensors=backward.tensors,
        operators=(*backward.of_forward(), *backward.operators),
        outputs=(*forward.outputs, *(backward.gradients[t.name] for t in sources if t.name in backward.gradients)),
    )


def without_gradient(forward: Graph) -> list[str]:
    """Return the parameters that no gradient reaches, such as a bias on which only a choice of experts depends.

    Raises:
        GraphError: as of `training_graph`, but for these parameters.
    """
    return _without_gradient(forward, _derived(forward))


def _without_gradient(forward: Graph, backward: "_Backward") -> list[str]:
    parameters = (tensor.name for tensor in forward.tensors.values() if tensor.role == "parameter")
    return [name for name in parameters if name not in backward.gradients]


def derived_from(forward: Graph) -> dict[str, str]:
    """Return, by backward operator, the forward operator that it is derived from.

    Sums of gradients and copies of them are derived from none, and are left out.

    Raises:
        GraphError: as of `training_graph`.
    """
    return _derived(forward).origins


def _derived(forward: Graph) -> "_Backward":
    backward = _Backward(forward)
    for operator in reversed(forward.operators):
        backward.visit(operator)
    return backward


def constants(forward: Graph) -> set[str]:
    """Return the tensors that need no gradient: constants, and what is made of them alone."""
    found = {name for name, tensor in forward.tensors.items() if tensor.constant}
    for operator in forward.operators:
        if operator.inputs and found.issuperset(operator.inputs):
            found.update(operator.outputs)
    return found


def norms_that_keep(forward: Graph) -> dict[str, str]:
    """Return the norms that leave their normalised input for backward, each with the type that it is kept in.

    They are those of float32 in a graph with products in 16 bits, whose input nobody else reads in backward, and was
    not in 16 bits before. What is normalised is about 1 whatever the mean and the scale of the input are, so rounding
    it changes a gradient by less than the products, which are rounded, do.
    """
    narrow = {forward.tensors[o.inputs[0]].dtype for o in forward.operators if o.kind == "contraction"} & NARROW
    if len(narrow) != 1:
        return {}
    (dtype,) = narrow

    def is_kept(norm: Operator) -> bool:
        (x, *_), readers = norm.inputs, forward.consumers[norm.inputs[0]]
        maker = forward.producers.get(x)
        was_narrow = maker is not None and maker.kind == "cast" and forward.tensors[maker.inputs[0]].dtype in NARROW
        others = [reader.kind for reader in readers if reader is not norm]
        return forward.tensors[x].dtype == "float32" and not was_narrow and UNREAD.issuperset(others)

    return {o.name: dtype for o in forward.operators if o.kind in NORMS and is_kept(o)}


def gradient_of(operator: Operator) -> Gradient:
    """Return the gradient that an operator's kind declares.

    Raises:
        GraphError: it declares none.
    """
    known = {kind.name: kind.gradient for kind in KINDS.values() if kind.gradient is not None}
    if operator.kind not in known:
        raise GraphError(
            f"operator {operator.name!r}: kind {operator.kind!r} has no backward rule; known: {', '.join(known)}"
        )
    return known[operator.kind]


class _Backward:
    """Backward operators in the making, while forward is visited from its end to its beginning.

    The gradient of a tensor is settled once all of its consumers have been visited: only then is it known whether a
    term is the gradient or a part of it.
    """

    def __init__(self, forward: Graph) -> None:
        self.forward = forward
        self.tensors = dict(forward.tensors)
        self.operators: list[Operator] = []
        self.gradients: dict[str, str] = {}
        self.origins: dict[str, str] = {}
        self._ready: dict[str, list[str]] = {name: [] for name in forward.tensors}
        self._planned: dict[str, list[tuple[Operator, Derivative]]] = {name: [] for name in forward.tensors}
        self._reads = Counter(tensor for operator in forward.operators for tensor in operator.inputs)
        self._unvisited = Counter(self._reads)
        self._constants = constants(forward)
        self._keeping = norms_that_keep(forward)
        self._kept: dict[str, Operator] = {}
        for output in dict.fromkeys(forward.outputs):
            if output not in forward.producers:
                raise GraphError(f"output {output!r} is made by no operator, so it has no gradient of its own")
            if output in self._constants:
                raise GraphError(f"output {output!r} depends on tensors without gradient only")
            self._ready[output].append(self._tensor(f"grad_{output}", output))

    def visit(self, operator: Operator) -> None:
        """Plan the backward operators of a forward operator, and settle the gradients that wait for no other."""
        for output in operator.outputs:
            self._settle(output)
        for output in operator.outputs[1:]:
            if output in self.gradients:
                raise GraphError(
                    f"operator {operator.name!r}: {self.gradients[output]!r} arrives at {output!r}, "
                    f"but only its first output, {operator.outputs[0]!r}, has a gradient"
                )
        if operator.outputs[0] in self.gradients:
            grad = self.gradients[operator.outputs[0]]
            for derived in self._derivatives(operator, grad):
                self._plan(operator, derived, grad)
        for tensor in operator.inputs:
            self._unvisited[tensor] -= 1
            if not self._unvisited[tensor] and tensor not in self.forward.producers:
                self._settle(tensor)

    def of_forward(self) -> tuple[Operator, ...]:
        """Return forward's operators, and behind norms those that make what these leave for backward."""
        return tuple(
            each for o in self.forward.operators for each in (o, self._kept.get(o.name)) if each is not None
        )  # fmt: skip

    def _derivatives(self, operator: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
        if operator.name not in self._keeping:
            return gradient_of(operator)(operator, grad)
        return of_normalised(operator, grad, self._kept_of(operator, self._keeping[operator.name]))

    def _kept_of(self, norm: Operator, dtype: str) -> str:
        """Have a norm's input be normalised in forward, in a type that is kept; return the name of what is made."""
        (x, *_), (y, *statistics) = norm.inputs, norm.outputs
        axes, (rest, *_) = norm.input_axes[0], norm.output_axes[1:]
        name = f"{y}_normalised"
        while name in self.tensors:
            name += "_"
        self.tensors[name] = Tensor(name, self.tensors[x].axes, dtype, "activation")
        spec = ",".join([axes, *[rest] * len(statistics)])
        self._kept[norm.name] = Operator(
            name, "normalised", f"{spec}->{axes}", (x, *statistics), (name,), (("dtype", dtype),)
        )
        return name

    def _plan(self, operator: Operator, derived: Derivative | HandedOn, grad: str) -> None:
        places = (derived.wrt,) if isinstance(derived, HandedOn) else derived.wrt
        if self._constants.issuperset(operator.inputs[place] for place in places):
            return
        if isinstance(derived, HandedOn):
            self._ready[operator.inputs[derived.wrt]].append(grad)
        elif len(derived.wrt) == 1:
            self._planned[operator.inputs[derived.wrt[0]]].append((operator, derived))
        else:
            wrt = [operator.inputs[i] for i in derived.wrt]
            names: list[str] = []
            for tensor in wrt:
                is_all = self._reads[tensor] == 1 and tensor not in self.forward.outputs
                name = f"grad_{tensor}" if is_all else self._part(tensor, operator)
                while name in names:  # one tensor may be read twice
                    name += "_again"
                names.append(name)
            self._emit(derived, dict(zip(names, wrt, strict=True)), operator)
            for tensor, name in zip(wrt, names, strict=True):
                self._ready[tensor].append(name)

    def _settle(self, tensor: str) -> None:
        """Sum the terms of a tensor's gradient."""
        ready = self._ready[tensor]
        planned = sorted(self._planned[tensor], key=lambda term: term[1].kind == "contraction")
        if not ready and not planned:
            return
        whole = f"grad_{tensor}" if f"grad_{tensor}" not in self.tensors else f"grad_{tensor}_sum"
        if not ready and len(planned) == 1:
            running = self._emit(planned[0][1], {whole: tensor}, planned[0][0])
        else:
            terms: list[str | tuple[Operator, Derivative]] = [*ready, *planned]
            running = self._term(terms[0], tensor)
            for number, term in enumerate(terms[1:], start=1):
                name = whole if number == len(terms) - 1 else f"grad_{tensor}_sum_{number}"
                running = self._add(running, self._term(term, tensor), name, tensor)
        if tensor not in self.forward.producers and running != f"grad_{tensor}":
            # The caller gets a tensor of its own, which no other gradient shares.
            axes = self.tensors[tensor].axes
            copy = Derivative("scale", f"{axes}->{axes}", (running,), attributes=(("factor", 1.0),))
            running = self._emit(copy, {f"grad_{tensor}": tensor})
        self.gradients[tensor] = running

    def _term(self, term: str | tuple[Operator, Derivative], tensor: str) -> str:
        if isinstance(term, str):
            return term
        operator, derivative = term
        return self._emit(derivative, {self._part(tensor, operator): tensor}, operator)

    def _part(self, tensor: str, operator: Operator) -> str:
        name = f"grad_{tensor}_from_{operator.name}"
        return name if name not in self.tensors else f"{name}_again"

    def _add(self, running: str, term: str, name: str, tensor: str) -> str:
        axes = self.tensors[tensor].axes
        return self._emit(Derivative("add", f"{axes},{axes}->{axes}", (running, term)), {name: tensor})

    def _emit(self, derivative: Derivative, names: Mapping[str, str], origin: Operator | None = None) -> str:
        """Append an operator that makes the tensors `names` (gradient: of which tensor); return the first.

        Args:
            origin: the forward operator that it is derived from; None of sums and copies.
        """
        outputs = tuple(self._tensor(name, tensor) for name, tensor in names.items())
        name = "_and_".join([outputs[0], *(o.removeprefix("grad_") for o in outputs[1:])])
        if origin is not None:
            self.origins[name] = origin.name
        attributes = derivative.attributes
        if derivative.kind == "cast":
            attributes = (("dtype", self.tensors[outputs[0]].dtype),)
        self.operators.append(
            Operator(name, derivative.kind, derivative.spec, derivative.inputs, outputs, attributes, "backward")
        )  # fmt: skip
        return outputs[0]

    def _tensor(self, name: str, of: str) -> str:
        if name in self.tensors:
            raise GraphError(f"tensor {name!r} exists already; its name is needed for the gradient of {of!r}")
        primal = self.tensors[of]
        self.tensors[name] = Tensor(name, primal.axes, primal.dtype, "gradient")
        return name
