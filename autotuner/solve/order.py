"""How large tables get along a good order of elimination, from which variables meet alone: no table is made."""

from collections.abc import Iterable, Mapping
from math import log2

from autotuner.checkpoint import checkpoint
from autotuner.solve.limits import needed_bytes


def estimated_bytes(scopes: Iterable[tuple[int, ...]], alive: Mapping[int, int]) -> float:
    """Return what the largest table of an elimination without bounds needs at most, the lightest result first.

    Rows that are missing are counted as if they were there, so the truth may be far less.

    Args:
        scopes: the variables of each table.
        alive: how many states of each variable are left.

    Source:
        Kjaerulff, Triangulation of graphs (1990), for orders by weight.
    """
    near: dict[int, set[int]] = {}
    for scope in scopes:
        for variable in scope:
            near.setdefault(variable, set()).update(scope)
    bits = {v: log2(max(1, alive[v])) for v in near}
    weight = {v: sum(bits[u] for u in others) for v, others in near.items()}
    most = 0.0
    while weight:
        checkpoint()
        variable = min(weight, key=lambda v: (weight[v], v))
        others = near.pop(variable)
        most = max(most, needed_bytes(2.0 ** weight.pop(variable), len(others)))
        others.discard(variable)
        for other in others:
            near[other] |= others
            near[other].discard(variable)
            weight[other] = sum(bits[u] for u in near[other])
    return most
