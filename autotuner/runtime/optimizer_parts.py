"""A step of an optimizer for some of its parameters: each is moved as by one step with all of them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import Parameter, signature

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from autotuner.runtime.capturable import has_hooks


def update_only(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Take a step with the other parameters left out of the optimizer's groups."""
    with only(optimizer, parameters):
        optimizer.step()


@contextmanager
def only(optimizer: Optimizer, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Leave the other parameters out of the optimizer's groups for a while."""
    wanted = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    all_of = [group["params"] for group in groups]
    try:
        for group, members in zip(groups, all_of, strict=True):
            group["params"] = [parameter for parameter in members if id(parameter) in wanted]
        yield
    finally:
        for group, members in zip(groups, all_of, strict=True):
            group["params"] = members


def needs_closure(optimizer: Optimizer) -> bool:
    """Say whether an optimizer's step has to be given a function that computes the loss, as that of LBFGS."""
    closure = signature(optimizer.step).parameters.get("closure")  # by its name: a schedule's wrapper shows `self`
    return closure is not None and closure.default is Parameter.empty


def refusal_of_parts(optimizer: Optimizer) -> str | None:
    """Say why an optimizer's step cannot be taken in parts, or return None if it can."""
    name = type(optimizer).__name__
    if not f"{type(optimizer).__module__}.".startswith("torch.optim.") or isinstance(optimizer, LBFGS):
        return f"{name} may do more in a step than that: take one of torch's, such as AdamW"
    if has_hooks(optimizer):
        return f"hooks of {name} would run for each part: remove them"
    return None
