"""Pieces of a program: it is cut where nothing but one tensor goes on, beside what all layers read."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from autotuner.runtime.capture.program import Operation, TensorValue, source_of

READS_MAX = 6
"""Nodes of one layer that read what flows into it, at most."""


def pieces_of(operations: Sequence[Operation], known: AbstractSet[TensorValue] = frozenset()) -> list[list[Operation]]:
    """Cut operators where one tensor goes on beside those that are known, between two nodes of the program."""
    last: dict[TensorValue, int] = {}
    for place, operation in enumerate(operations):
        for operand in operation.inputs:
            last[operand.view.tensor] = place
    pieces: list[list[Operation]] = [[]]
    learned = _of_parameters(operations)
    flowing, memory = _flowing(operations) - known, _memory(operations) | known
    alive: set[TensorValue] = set()
    for place, operation in enumerate(operations):
        pieces[-1].append(operation)
        alive |= {operand.view.tensor for operand in operation.inputs if operand.view.tensor in flowing}
        alive |= {tensor for tensor in operation.outputs if last.get(tensor, -1) > place}
        alive = {tensor for tensor in alive if last[tensor] > place}
        behind = operations[place + 1] if place + 1 < len(operations) else None
        going_on = len(alive - memory) or (1 if alive else 0)
        is_weight = alive <= learned  # as the scale of a norm, 1 + weight, that is computed before its input is read
        if behind is not None and behind.place != operation.place and going_on == 1 and not is_weight:
            pieces.append([])
    return pieces


def _of_parameters(operations: Iterable[Operation]) -> set[TensorValue]:
    """Return tensors that operators make of parameters alone."""
    found: set[TensorValue] = set()
    for operation in operations:
        tensors = [operand.view.tensor for operand in operation.inputs]
        if tensors and all(tensor.parameter or tensor in found for tensor in tensors):
            found.update(operation.outputs)
    return found


def _memory(operations: Sequence[Operation]) -> set[TensorValue]:
    """Return tensors that operators make for all layers behind them, as the result of an encoder is for a decoder."""
    places: dict[TensorValue, set[int]] = {}
    for operation in operations:
        for operand in operation.inputs:
            if operand.view.tensor.made_by is not None:
                places.setdefault(operand.view.tensor, set()).add(operation.place)
    return {tensor for tensor, read_at in places.items() if len(read_at) > READS_MAX}


def _flowing(operations: Sequence[Operation]) -> set[TensorValue]:
    """Return tensors from outside that the first operators work on, as later ones do on what those have made.

    Others are masks, position embeddings, the result of an encoder: read beside what flows on, or in every layer.
    """
    places: dict[TensorValue, set[int]] = {}
    first = set()
    inside = set(operations)
    for operation in operations:
        for number, operand in enumerate(operation.inputs):
            tensor = source_of(operand.view.tensor)
            if tensor.made_by not in inside and not tensor.parameter and operation.kind != "cast":
                places.setdefault(tensor, set()).add(operation.place)
                if number == 0:
                    first.add(tensor)
    return {tensor for tensor in first if len(places[tensor]) <= READS_MAX}
