"""Gradients of operator kinds: the backward operators that a forward operator asks for."""

from collections.abc import Callable
from dataclasses import dataclass

from autotuner.errors import GraphError
from autotuner.ir.graph import Operator
from autotuner.ir.program import parse_program
from autotuner.ir.records import Attributes

OF_PRIMAL = ""
"""Type of a derived `cast`: that of the tensor whose gradient it makes."""


@dataclass(frozen=True, slots=True)
class Derivative:
    """A backward operator that a rule asks for: it makes the gradients with respect to the inputs numbered `wrt`."""

    kind: str
    spec: str
    inputs: tuple[str, ...]
    wrt: tuple[int, ...] = (0,)
    attributes: Attributes = ()


@dataclass(frozen=True, slots=True)
class HandedOn:
    """The gradient with respect to input `wrt` is the output's gradient itself."""

    wrt: int = 0


Gradient = Callable[[Operator, str], tuple[Derivative | HandedOn, ...]]


def contraction(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    (a, b), (c,) = o.input_axes, o.output_axes
    return (
        Derivative("contraction", f"{c},{b}->{a}", (grad, o.inputs[1]), (0,)),
        Derivative("contraction", f"{c},{a}->{b}", (grad, o.inputs[0]), (1,)),
    )


def bias(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    x, bias = o.input_axes
    return HandedOn(), Derivative("bias_grad", f"{x}->{bias}", (grad,), (1,))


def scale(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    return (Derivative("scale", o.spec, (grad,), attributes=o.attributes),)


def mask(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:  # noqa: ARG001
    return (HandedOn(),)


def row_mask(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    return (Derivative("row_mask", o.spec, (grad, o.inputs[1])),)


def cast(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    return (Derivative("cast", o.spec, (grad,), attributes=(("dtype", OF_PRIMAL),)),)


def softmax(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    (x, *sinks), (_, rest) = o.input_axes, o.output_axes
    read = f"{x},{x},{rest}"
    into_scores = Derivative("softmax_grad", f"{read}->{x}", (grad, *o.outputs), attributes=o.attributes)
    into_sinks = (
        Derivative("sink_grad", f"{read},{sink}->{sink}", (grad, *o.outputs, o.inputs[1]), (1,), o.attributes)
        for sink in sinks
    )
    return into_scores, *into_sinks


def of_input(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    (x,) = o.input_axes
    return (Derivative(f"{o.kind}_grad", f"{x},{x}->{x}", (grad, *o.inputs)),)


def relu(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    (x,) = o.input_axes
    return (Derivative("relu_grad", f"{x},{x}->{x}", (grad, *o.outputs)),)


def dropout_mask(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    raise GraphError(f"operator {o.name!r}: {grad!r} arrives at a mask that is drawn, and a draw has no gradient")


def dropout(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    return (Derivative("dropout", o.spec, (grad, o.inputs[1]), attributes=o.attributes),)


def add(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:  # noqa: ARG001
    return HandedOn(0), HandedOn(1)


def multiply(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    x, y = o.inputs
    return Derivative("multiply", o.spec, (grad, y), (0,)), Derivative("multiply", o.spec, (grad, x), (1,))


def rotary(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    return (Derivative("rotary_grad", o.spec, (grad, *o.inputs[1:]), attributes=o.attributes),)


def layer_norm(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    (x, *affine), (_, rest, _) = o.input_axes, o.output_axes
    statistics = o.outputs[1:]
    read = ",".join([x, x, *affine[:1], rest, rest])
    into_input = Derivative("layer_norm_grad_input", f"{read}->{x}", (grad, *o.inputs[:2], *statistics))
    if not affine:
        return (into_input,)
    return into_input, Derivative(
        "layer_norm_grad_parameters", f"{x},{x},{rest},{rest}->{','.join(affine)}", (grad, o.inputs[0], *statistics),
        tuple(range(1, len(o.inputs))),
    )  # fmt: skip


def rms_norm(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    (x, *scale), (_, rest) = o.input_axes, o.output_axes
    reciprocal_root = o.outputs[1]
    read = ",".join([x, x, *scale, rest])
    into_input = Derivative("rms_norm_grad_input", f"{read}->{x}", (grad, *o.inputs, reciprocal_root))
    if not scale:
        return (into_input,)
    read = ",".join([x, x, rest])
    return into_input, Derivative(
        "rms_norm_grad_parameters", f"{read}->{scale[0]}", (grad, o.inputs[0], reciprocal_root), (1,)
    )


def of_normalised(o: Operator, grad: str, normalised: str) -> tuple[Derivative, ...]:
    """Return the derivatives of a norm from what its input was normalised to, in place of the input."""
    (x, *affine), (_, rest, *_) = o.input_axes, o.output_axes
    read = ",".join([x, x, *affine[:1], rest])
    into_input = Derivative(
        "normalised_grad_input", f"{read}->{x}", (grad, normalised, *o.inputs[1:2], o.outputs[-1]),
        attributes=(("centred", o.kind == "layer_norm"),),
    )  # fmt: skip
    if not affine:
        return (into_input,)
    places = tuple(range(1, len(o.inputs)))
    return into_input, Derivative(
        "normalised_grad_parameters", f"{x},{x}->{','.join(affine)}", (grad, normalised), places
    )


def program(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    """Return one operator that makes the gradients of all inputs of which they are wanted."""
    text, (made,) = str(o.attribute("program")), o.output_axes
    found = parse_program(text)
    if not found.wanted:
        return ()
    read = ",".join([made, *(o.input_axes[place] for place in found.saved)])
    makes = ",".join(o.input_axes[place] for place in found.wanted)
    inputs = (grad, *(o.inputs[place] for place in found.saved))
    return (Derivative("program_grad", f"{read}->{makes}", inputs, found.wanted, (("program", text),)),)


def choice(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    raise GraphError(f"operator {o.name!r}: {grad!r} arrives at a choice, which has no gradient")


def pointwise(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    """Return an operator for each input of which a gradient is wanted; a sum where the input lacks axes."""
    text, (whole,) = str(o.attribute("program")), o.output_axes
    found = parse_program(text)
    read = ",".join([whole, *(o.input_axes[place] for place in found.saved)])
    inputs = (grad, *(o.inputs[place] for place in found.saved))
    return tuple(
        Derivative("pointwise_grad" if o.input_axes[place] == whole else "pointwise_sum",
                   f"{read}->{o.input_axes[place]}", inputs, (place,), (("program", text), ("wrt", place)))
        for place in found.wanted
    )  # fmt: skip
