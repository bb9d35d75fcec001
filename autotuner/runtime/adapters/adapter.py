"""What the runtime knows of a framework's module."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from autotuner.ir.records import Scalar
from autotuner.plan.placement.port import Port

Parts = tuple[Any, ...]


class Description(NamedTuple):
    """Which model a module is: name of the model file, extents without batch and sequence, options and dtype.

    The option `attention_mask` is not among them: a module takes both calls with a mask and calls without.
    """

    model: str
    extents: Mapping[str, int]
    options: Mapping[str, Scalar]
    dtype: str


@dataclass(frozen=True)
class Adapter:
    """How to read one framework module.

    Args:
        tuned: path of the drop-in's class, "package.module:Class".
        kinds: by the path of each submodule that the model stands for, the classes that it may be of.
        ports: parameters as the module names them, over the graph's parameters.
        refuses: says in a sentence why a module of these kinds cannot be tuned at all, or None.
        describe: reads extents, options and dtype of a module that is not refused.
        parts: the submodules that a forward uses and its activation: a replaced one shows.
        settings: from the parts, the dropout probabilities in force, by option, and both epsilons.
        batch_first: whether the module's tensors are batch, sequence, hidden.
    """

    tuned: str
    kinds: Mapping[str, tuple[type[nn.Module], ...]]
    ports: tuple[Port, ...]
    refuses: Callable[[nn.Module], str | None]
    describe: Callable[[nn.Module], Description]
    parts: Callable[[nn.Module], Parts]
    settings: Callable[[Parts], tuple[float, ...]]
    batch_first: Callable[[nn.Module], bool]


# Order of `Adapter.settings`; both layer norms share the option epsilon.
SETTINGS = (
    "attention_dropout",
    "output_dropout",
    "activation_dropout",
    "feed_forward_dropout",
    "epsilon",
    "epsilon",
)
DROPOUTS = SETTINGS[:4]


def linear(name: str, members: tuple[str, ...], output: str, summed: str) -> tuple[Port, Port]:
    """Return the ports of a linear layer's weight and bias; `members` are the weights' names without "_weight"."""
    return (
        Port(f"{name}weight", tuple(f"{m}_weight" for m in members), (output, summed)),
        Port(f"{name}bias", tuple(f"{m}_bias" for m in members), (output,)),
    )


def norm(name: str, member: str) -> tuple[Port, Port]:
    """Return the ports of a layer norm's weight and bias."""
    return Port(f"{name}.weight", (f"{member}_scale",), ("h",)), Port(f"{name}.bias", (f"{member}_bias",), ("h",))


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
