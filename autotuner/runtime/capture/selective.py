"""Selective checkpoints: what a policy says of the calls inside of regions, and of a region as an operator.

A policy, as `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes it, says of each operator whether its
result is kept for backward or computed again. A region is one operator, `torch.ops.autotuner.tuned_region.default`:
all that its forward saves is kept, or its forward runs again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS, SelectiveCheckpointContext

from autotuner.runtime.capture.calls import run_on_examples

CONTEXTS = "_checkpoint_context_fn"
"""Key of the function that makes a checkpoint's contexts, in the data that dynamo notes beside its body."""
REGION = "torch.ops.autotuner.tuned_region.default"

Policy = Callable[..., Any]


def told_of_policies(bodies: Mapping[fx.GraphModule, Iterable[set[fx.Node]]]) -> str:
    """Say what is done where a policy keeps some calls of a region and not others; "" where there is nothing to say.

    Args:
        bodies: what is checkpointed, each with the nodes of its regions.
    """
    found: Counter[tuple[bool, int, int]] = Counter()
    for body, regions in bodies.items():
        policy = _policy_of(body) if CONTEXTS in body.meta else None
        if policy is None:
            continue
        kept, called = _answers(body, policy)
        whole = _of_region(policy)
        for nodes in regions:
            some, all_of_them = (sum(counts[node] for node in nodes) for counts in (kept, called))
            if some != (all_of_them if whole else 0):
                found[whole, some, all_of_them] += 1
    return "; ".join(
        f"a selective checkpoint keeps {some} of the {all_of_them} results inside of each of {count} regions, and a "
        f"region is one operator, {REGION}: the policy has what it saves "
        + ("kept as a whole" if whole else "computed again as a whole; name the operator in the policy to keep it")
        for (whole, some, all_of_them), count in found.items()
    )


def _policy_of(body: fx.GraphModule) -> Policy | None:
    """Return the policy of a checkpoint, None where its contexts are none of torch's selective ones."""
    try:
        forward, _ = body.meta[CONTEXTS]()
    except Exception:  # a user's function; torch calls it again, and says what is wrong
        return None
    policy: Policy | None = getattr(forward, "policy_fn", None)
    return policy


def _keeps(answer: Any) -> bool:
    """Say whether an answer of a policy has a result kept for backward."""
    return answer is True or (answer is not False and not str(getattr(answer, "name", "")).endswith("RECOMPUTE"))


def _of_region(policy: Policy) -> bool:
    try:
        return _keeps(policy(_context(None), torch.ops.autotuner.tuned_region.default))
    except Exception:  # it reads the arguments of an operator, which are not known yet
        return False


def _context(output: Any) -> SelectiveCheckpointContext:
    try:
        return SelectiveCheckpointContext(is_recompute=False, op_output=output)
    except TypeError:  # before torch 2.12
        return SelectiveCheckpointContext(is_recompute=False)


def _answers(body: fx.GraphModule, policy: Policy) -> tuple[Counter[fx.Node], Counter[fx.Node]]:
    """Return by node how many results a policy keeps, and of how many it was asked."""
    kept, called = Counter[fx.Node](), Counter[fx.Node]()
    for node in body.graph.nodes:
        if node.op in ("call_function", "call_method"):
            asking = _Asking(policy)
            try:
                run_on_examples(node, asking)
            except Exception:  # whatever cannot be called by itself
                continue
            kept[node] = sum(asking.answers)
            called[node] = len(asking.answers)
    return kept, called


class _Asking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Asks a policy about each operator that runs, as torch does; views keep nothing of their own."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy = policy
        self.answers: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func not in SAC_IGNORED_OPS and not func.is_view:
            self.answers.append(_keeps(self._policy(_context(made), func, *args, **kwargs)))
        return made
