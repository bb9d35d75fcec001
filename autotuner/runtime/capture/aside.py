"""Operators aside: what is computed of all layers, behind them and without a product, as an auxiliary loss of routers.

They stay torch's. In a region, they would keep something of each layer alive until the end, so that nothing could be
cut between two layers.
"""

from collections.abc import Sequence

from autotuner.runtime.capture.program import Operation, TensorValue, product_flop

SPREAD_MIN = 0.5
"""Share of the products that lie between what is read first and what is read last, at least."""


def aside(operations: Sequence[Operation]) -> set[Operation]:
    """Return operators, of some in order, that no product follows, and that put together what is made far apart
    and read there as well."""
    readers: dict[TensorValue, list[Operation]] = {}
    for operation in operations:
        for operand in operation.inputs:
            readers.setdefault(operand.view.tensor, []).append(operation)
    before: dict[Operation, int] = {}  # how many products there are before an operator
    products = 0
    for operation in operations:
        before[operation] = products
        products += product_flop(operation) > 0
    tail: set[Operation] = set()
    for operation in reversed(operations):
        behind = (reader for tensor in operation.outputs for reader in readers.get(tensor, ()))
        if not product_flop(operation) and tail.issuperset(behind):
            tail.add(operation)
    found: set[Operation] = set()
    for part in _connected(tail, readers):
        tensors = {operand.view.tensor for operation in part for operand in operation.inputs}
        read = {each: before[each.made_by] for each in tensors if each.made_by in before and each.made_by not in tail}
        is_beside = all(not tail.issuperset(readers[tensor]) for tensor in read)  # and the layers go on without it
        if read and is_beside and max(read.values()) - min(read.values()) >= SPREAD_MIN * products:
            found |= part
    return found


def _connected(some: set[Operation], readers: dict[TensorValue, list[Operation]]) -> list[set[Operation]]:
    """Return operators in sets of which one reads what another makes."""
    near: dict[Operation, set[Operation]] = {operation: set() for operation in some}
    for operation in some:
        for reader in (each for tensor in operation.outputs for each in readers.get(tensor, ())):
            near[operation].add(reader)
            near[reader].add(operation)
    parts, left = [], set(some)
    while left:
        part, waiting = set[Operation](), [next(iter(left))]
        while waiting:  # each turn takes an operator that was not there yet, or drops one
            operation = waiting.pop()
            if operation not in part:
                part.add(operation)
                waiting += near[operation]
        parts.append(part)
        left -= part
    return parts
