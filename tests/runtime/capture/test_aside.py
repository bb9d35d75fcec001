"""Operators that stay torch's because they put together what all layers make: an auxiliary loss of routers."""

from typing import Any

from autotuner.runtime.capture.aside import aside
from autotuner.runtime.capture.axes import fresh
from autotuner.runtime.capture.program import BoundView, Operation, TensorValue, View

EXTENTS = (4, 8)


def tensor(**given: Any) -> TensorValue:
    return TensorValue(fresh(EXTENTS), "float32", **given)


class Made:
    """Operators in the order in which they are made."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def __call__(self, kind: str, *read: TensorValue) -> TensorValue:
        operands = tuple(BoundView(View(each, each.dims)) for each in read)
        (made,) = outputs = (tensor(),)
        self.operations.append(Operation(kind, operands, outputs, {}))
        made.made_by = self.operations[-1]
        return made


def layers(made: Made, count: int) -> list[TensorValue]:
    """Append layers of two products with a residual sum, and return what each one's first product makes."""
    x, found = tensor(), []
    for _ in range(count):
        found.append(made("contraction", x, tensor(parameter=True)))
        down = made("contraction", made("relu", found[-1]), tensor(parameter=True))
        x = made("add", x, down)
    return found


def test_a_sum_over_all_layers_is_aside_and_the_end_of_the_last_layer_is_not() -> None:
    made = Made()
    of_layers = layers(made, 4)
    own = list(made.operations)
    total = made("relu", of_layers[0])
    for each in of_layers[1:]:
        total = made("add", total, made("relu", each))
    assert aside(made.operations) == set(made.operations) - set(own)


def test_what_only_the_end_reads_is_not_aside() -> None:
    made = Made()
    x = tensor()
    gate, up = (made("contraction", x, tensor(parameter=True)) for _ in range(2))
    made("multiply", made("silu", gate), up)
    assert aside(made.operations) == set()
