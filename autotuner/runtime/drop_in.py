"""Putting a configuration in place of a framework's module: `apply`, and what it checks before."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from autotuner.errors import ConfigurationError
from autotuner.plan.configuration import Configuration
from autotuner.runtime.adapter import DROPOUTS, Adapter, Description, check_fit, description_of, dims_of
from autotuner.runtime.adapters import adapter_for, drop_in_for
from autotuner.runtime.module import sharing


def describe(module: nn.Module) -> Description:
    """Return which model a framework module is.

    Raises:
        ConfigurationError: it cannot be tuned; the message says what about it.
    """
    return description_of(adapter_for(module), module)


def check_all_fit(adapter: Adapter, module: nn.Module, configurations: Sequence[Configuration]) -> None:
    """Check that configurations were made for modules like this one, each for other calls.

    Raises:
        ConfigurationError: one is of another layer; two are for the same calls.
    """
    errors = []
    for number, configuration in enumerate(configurations, 1):
        where = f"number {number} of {len(configurations)}: " if len(configurations) > 1 else ""
        try:
            check_fit(adapter, module, configuration)
        except ConfigurationError as error:
            errors.append(f"{where}{error}")
            try:
                check_fit(adapter, module, configuration, or_eval=True)
            except ConfigurationError:
                raise ConfigurationError(errors[-1]) from None
    if len(errors) == len(configurations) and module.training:
        raise ConfigurationError(
            f"{errors[0]}; without dropout it is for eval mode: give it beside one for training, apply(layer, [train, "
            "eval]), or a layer that is in eval mode"
        )
    calls = Counter(
        (
            c.model.extents["b"],
            c.model.extents["l"],
            "" if any(c.model.options[name] for name in DROPOUTS) else " without dropout",
            " with attention_mask=true" if c.model.options.get("attention_mask") else "",
        )
        for c in configurations
    )
    (batch, length, dropout, mask), count = calls.most_common(1)[0]
    if count > 1:
        raise ConfigurationError(
            f"{count} configurations are for b={batch} l={length}{dropout}{mask}: give one for each shape, mode "
            "(train, eval) and kind of mask"
        )


def apply(
    module: nn.Module, configuration: Configuration | Sequence[Configuration], *, graphs: bool = True
) -> nn.Module:
    """Return a drop-in for a framework module that runs a configuration, or several, each for other calls.

    It shares parameters and submodules with the module, and leaves them as they are: every parameter stays the same
    object, in the same memory. Where a plan wants one to lie otherwise, it is copied before each forward. Gradients are
    contiguous. `restore` is the way back.

    Args:
        module: nn.TransformerEncoderLayer or transformers' BertLayer, on the device that the configuration is for.
        configuration: tuned for its extents, options and dtype. Of several, each is for another `b` or `l`, for eval
            mode (every dropout 0) beside train mode, or for calls with a mask over keys beside those without.
        graphs: on CUDA, capture forward and backward as CUDA graphs when they run for the second time, and replay them
            from then on. Ignored on the CPU.

    Raises:
        ConfigurationError: it was tuned for another layer; the message lists what differs. Or two are for the same
            calls. Or the module's own forward was replaced, and so would never run the configuration.
    """
    configurations = (configuration,) if isinstance(configuration, Configuration) else tuple(configuration)
    if not configurations:
        raise ConfigurationError("no configuration is given: give one, or one for each shape of the input")
    drop_in = drop_in_for(module)
    check_all_fit(drop_in.adapter, module, configurations)
    if "forward" in module.__dict__:
        raise ConfigurationError(
            f"the forward of this {type(module).__name__} was replaced on the instance, which a tuned layer would go "
            "on running: apply the configuration first, and patch or prepare the model (accelerate) after that"
        )
    tuned = sharing(module, drop_in)
    dims = dims_of(drop_in.adapter, module)
    tuned.__dict__.update(
        configurations=configurations,
        shapes=tuple(torch.Size(one.model.extents[axis] for axis in dims) for one in configurations),
        calls=0,
        fallbacks=Counter(),
        told=Counter(),
        graphs=graphs,
        _bindings=(),
    )
    tuned.bind()
    return tuned
