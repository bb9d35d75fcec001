"""Training of models that are larger than the device: one layer after the other is brought there."""

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from autotuner.api.backend import compile_graph
from autotuner.api.caches import without_cache
from autotuner.api.knowledge import Given
from autotuner.api.options import check_examples, chosen
from autotuner.api.telling import Teller, show
from autotuner.api.training import called, objective_of, trace_past_notes
from autotuner.errors import InputError
from autotuner.extras import needed_for
from autotuner.plan.phrases import binary
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.layer_to_layer.host_layer import HostLayer
from autotuner.runtime.layer_to_layer.layer_lists import repeated_layers
from autotuner.runtime.layer_to_layer.micro_batches import MicroBatches, of_many_sizes
from autotuner.runtime.layer_to_layer.replaced_forward import ReplacedForward
from autotuner.runtime.layer_to_layer.step import LayerToLayerStep
from autotuner.runtime.loss_items import items_of
from autotuner.runtime.optimizer_parts import refusal_of_parts
from autotuner.runtime.processes import are_several
from autotuner.settings import TuneKeywords, TuneOptions, parsed_bytes

if TYPE_CHECKING:
    from autotuner.api.tuning import Effort
    from autotuner.fleet.tuning import Fleet
    from autotuner.server.client import Client
    from autotuner.tuner import Watch

STEPS: "WeakSet[LayerToLayerStep]" = WeakSet()
"""The steps of this process."""


def layer_to_layer(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    example_inputs: Any = None,
    device: torch.device | str | None = None,
    link_dtype: torch.dtype | None = None,
    max_norm: float | None = None,
    clipping: Literal["global", "layer"] = "global",
    optimizer_in_backward: bool = False,
    stash: Literal["device", "host"] = "device",
    memory_budget: int | str | None = None,
    micro_batch_size: int | Literal["auto"] | None = None,
    loss_items: Callable[[Any], float] | None = None,
    database: str | Path | None = None,
    server: "str | Client | None" = None,
    configurations: Given | None = None,
    compiler: str | None = "inductor",
    threads: int | None = None,
    space: str | Path | None = None,
    watch: "Watch | None" = show,
    fleet: "Fleet | None" = None,
    **tuning: Unpack[TuneKeywords],
) -> LayerToLayerStep:
    """Return a function that runs a training step of a model whose layers stay on the host.

    The layers' parameters, gradients and optimizer state are on the host. The device holds the weights of two layers:
    the one that computes, and the next one, which is copied meanwhile. Of forward, only the inputs of layers are kept,
    and backward runs each layer again. So the layers' parameters may be larger than the device, and a step takes at
    least a third longer than one of a model that fits. Micro-batches share the copies: `step(first, second, third)`.

    The layers are the members of the model's outermost lists of modules. What is in none, such as embedding and head,
    is moved to the device. Parameters remain the objects that they are: the optimizer, schedulers of its learning rate,
    `state_dict` and `save_pretrained` work as before, and the model may be evaluated under `torch.no_grad()`.

    Args:
        model: not compiled; a layer may have any arguments and outputs.
        optimizer: one of torch's that moves each parameter for itself. Give it `fused=True` where it has that option:
            on a CPU its default updates parameter by parameter, five times as slowly.
        loss: as in `training_step`.
        example_inputs: a batch, as large as a micro-batch, or one of which a number `micro_batch_size` takes rows; the
            regions in its layers are tuned here and now, unless the database knows them. Where steps run under
            autocast, call this under the same.
        device: that computes; by default that of the parameters, or of torch's accelerator where they are on the CPU.
        link_dtype: torch.bfloat16, in which matrices of float32 go to the device, and their gradients come back: half
            of the bytes. For steps under autocast of this type, which rounds what it multiplies anyway. The values on
            the host stay float32. By default, nothing is rounded.
        max_norm: gradients are scaled down where their norm is larger.
        clipping: whether that norm is the one of all gradients ("global"), or of those of each layer ("layer").
        optimizer_in_backward: whether the host updates a layer while the device computes the one before it. Otherwise
            all gradients are waited for, and a step in which one is not finite updates nothing.
        stash: where the inputs of layers are kept until backward: with "host", a step's memory on the device does not
            grow with the number of layers.
        memory_budget: what a step may need on the device, in bytes or as in "16GiB": everything that torch has
            allocated there. The first step of a shape keeps the inputs of layers on the host, and is measured; then
            they are kept on the device where there is room. In place of `stash`.
        micro_batch_size: rows of the micro-batches that `step(batch)` splits a batch into, along the first axis of its
            tensors; "auto" for what is fastest, by three steps of each size that is tried, each of which trains. Then
            the inputs of layers are kept where there is room, as with `memory_budget`. By default, what a step is given
            are the micro-batches.
        loss_items: how many things the loss of a micro-batch is a mean of, such as its labels that count. By default,
            it is known of most losses of transformers' models, and rows weigh the same in any other.
        database: as in `optimize`; so are server, configurations, threads, space, watch, fleet and tuning. Layers of
            which configurations are known run tuned.
        compiler: of what is not tuned in the layers: "inductor", "aot_eager" or "eager"; None for layers that are not
            compiled, and do not run tuned.

    Returns:
        The step: `loss = step(batch)`; `step.close()` gives the layers their own forward back.

    Raises:
        InputError: several of database, server and configurations; example inputs with one of the last two, or for
            layers that are not compiled; a model that is compiled, or has no list of layers; a parameter that layers
            share; an optimizer whose step cannot be taken in parts; a norm of all gradients with
            `optimizer_in_backward`; too little memory on the host; several processes; a budget for a device without
            memory of its own.
        BudgetError: at the first step of a shape: it needs more, even with the inputs of layers on the host.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        given = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise InputError(f"layer_to_layer takes a module and an optimizer of torch's, and was given {given}")
    if any(isinstance(module, torch._dynamo.OptimizedModule) for module in model.modules()):
        raise InputError("this model is compiled already: give layer_to_layer the model that torch.compile was given")
    if any(isinstance(vars(module).get("forward"), ReplacedForward) for module in model.modules()):
        raise InputError("this model has a step already: step.close() first")
    asked = TuneOptions.of(**tuning)  # unknown options end here, also where nothing is tuned
    if are_several():
        raise InputError(
            "several processes train one model, and layer to layer is for one: run it in a process without a group"
        )
    if link_dtype not in (None, torch.bfloat16):
        raise InputError(f"link_dtype={link_dtype}: give torch.bfloat16, or None for no rounding")
    if max_norm is not None and (not isinstance(max_norm, int | float) or not max_norm > 0):
        raise InputError(f"max_norm={max_norm!r}: give a number above 0, or None for no clipping")
    if clipping not in ("global", "layer"):
        raise InputError(f"clipping={clipping!r}: give 'global' or 'layer'")
    budget_bytes = parsed_bytes(memory_budget, "memory_budget")
    if budget_bytes is not None and stash == "host":
        raise InputError(
            "memory_budget says where the inputs of layers are kept, and so does stash: give one of the two"
        )
    if stash not in ("device", "host"):
        raise InputError(f"stash={stash!r}: give 'device' or 'host'")
    if micro_batch_size not in (None, "auto"):
        micro_batch_size = _checked_size(micro_batch_size)
    if micro_batch_size is None and loss_items is not None:
        raise InputError("loss_items is for batches that a step splits: give micro_batch_size, too")
    normed = "" if micro_batch_size is None else _normed_by_batch(model)
    if normed:
        raise InputError(
            f"{normed} takes its mean over all rows of a micro-batch, so that a batch that is split computes something "
            "else: leave micro_batch_size out"
        )
    if max_norm is not None and clipping == "global" and optimizer_in_backward:
        raise InputError(
            f"max_norm={max_norm:g} needs the norm of all gradients before the first update, and optimizer_in_backward "
            "updates before all are there: give one of the two, or clipping='layer'"
        )
    if not {id(p) for group in optimizer.param_groups for p in group["params"]} & set(map(id, model.parameters())):
        raise InputError("the optimizer has none of the model's parameters: make it of model.parameters()")
    reason = refusal_of_parts(optimizer)
    if reason is not None:
        raise InputError(f"layer_to_layer moves parameters layer by layer, and {reason}")
    check_examples(example_inputs, server, configurations)
    if compiler is None and example_inputs is not None:
        raise InputError(
            "example_inputs are there to tune layers, and with compiler=None none runs tuned: leave one of them out"
        )
    options = None if compiler is None else chosen(database, server, configurations, compiler, asked)
    found = repeated_layers(model)
    runs_on = _device(model, device)
    _check_host_memory(found, optimizer, link_dtype, optimizer_in_backward)
    link = device_runtime(runs_on).link()
    layers = [HostLayer(name, module, link, link_dtype) for name, module in found.items()]
    _place(model, layers, optimizer, runs_on)
    trace_past_notes(model)
    objective = objective_of(model, loss or partial(called, **without_cache(model)))
    items = loss_items or items_of(model, has_own_loss=loss is not None)
    splits = None if micro_batch_size is None else MicroBatches(micro_batch_size, items)
    step = LayerToLayerStep(
        model, optimizer, objective, layers, device=runs_on,
        link=link, max_norm=max_norm, in_backward=optimizer_in_backward, norm_per_layer=clipping == "layer",
        stash_on_host=stash == "host", budget_bytes=budget_bytes,
        micro_batches=splits,
    )  # fmt: skip
    if example_inputs is not None:
        if splits is not None and micro_batch_size != "auto":
            example_inputs = splits.split([example_inputs])[0].batch
        with needed_for("tuning"):
            from autotuner.api.tuning import Effort

        effort = Effort(database=database, threads=threads, space=space, fleet=fleet, tuning=tuning)
        _tune(step, example_inputs, runs_on, effort, Teller(watch))
    if options is not None:
        options |= {"quiet": watch is not show}
        for layer in layers:
            layer.forward = torch.compile(layer.forward, backend=compile_graph, options=options, dynamic=False)
        around = _modules_around(model, found)
        if around:
            step.run_as_they_are(around)
            step.loss = _cut_by_layers(
                torch.compile(objective, backend=_compiled_rest, options=options, dynamic=False),
                has_many=micro_batch_size == "auto",
            )  # fmt: skip
    STEPS.add(step)
    return step


def _checked_size(given: Any) -> int:
    try:
        size = -1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        size = -1
    if size < 1:
        raise InputError(f"micro_batch_size={given!r}: give a number of rows, 'auto', or None for batches as given")
    return size


def _normed_by_batch(model: nn.Module) -> str:
    """Return the class of a part that takes means over a batch, or "" where there is none."""
    parts = (each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm))
    return next((type(each).__name__ for each in parts), "")


def _modules_around(model: nn.Module, layers: Iterable[str]) -> list[nn.Module]:
    """Return the parts of a model that hold its layers, or nothing where one of them is the model itself.

    They are not compiled: transformers makes masks there that it leaves out where it is not. What is around them is.
    """
    found = {name.partition(".")[0]: name for name in layers}
    parts = {name: model.get_submodule(name) for name in found}
    is_called = all(
        part not in (model.get_submodule(found[name]), model)
        and not isinstance(part, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        for name, part in parts.items()
    )
    return list(parts.values()) if is_called else []


def _cut_by_layers(compiled: Callable[[Any], Tensor], has_many: bool) -> Callable[[Any], Tensor]:
    """Have the functions around a part that is not compiled go on in one graph behind it.

    So what they return and nobody reads is left out, such as logits beside their loss.

    Args:
        has_many: whether batches of many sizes are tried.
    """

    def run(batch: Any) -> Tensor:
        with torch._dynamo.config.patch(nested_graph_breaks=True), of_many_sizes() if has_many else nullcontext():
            return compiled(batch)

    return run


def _compiled_rest(module: Any, inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """Compile what is in no layer: its backward may run in several parts, one after the other."""
    with torch._functorch.config.patch(donated_buffer=False):
        return compile_graph(module, inputs, **given)


def _tune(step: LayerToLayerStep, batch: Any, device: torch.device, effort: "Effort", teller: Teller) -> None:
    """Tune the regions of layers; those alike in class and parameters have the same ones."""
    from autotuner.api.tuning import tune_calls

    seen: set[Any] = set()
    with step.example_calls(batch) as calls:
        for layer, arguments, keywords in calls:
            kind = type(layer.module), layer.weights, tuple(_shapes((arguments, keywords)))
            if kind in seen:
                continue
            seen.add(kind)

            def run(*given: Any, forward: Callable[..., Any] = layer.forward, named: Any = keywords) -> Any:
                return forward(*given, **named)

            tune_calls(run, [arguments], device.type, effort, teller)


def _shapes(nested: Any) -> Sequence[Any]:
    leaves, _ = tree_flatten(nested)
    return [(each.shape, each.dtype) if isinstance(each, Tensor) else type(each) for each in leaves]


def _device(model: nn.Module, given: torch.device | str | None) -> torch.device:
    if given is None:
        own = {parameter.device for parameter in model.parameters() if not parameter.is_cpu}
        if len(own) > 1:
            raise InputError(f"the parameters are on {' and '.join(sorted(map(str, own)))}: say which is to compute")
        there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        found = own.pop() if own else there or torch.device("cpu")
    else:
        try:
            found = torch.device(given)
        except RuntimeError as error:
            raise InputError(f"device={given!r}: {str(error).splitlines()[0]}") from None
    if found.type != "cpu" and found.index is None:
        return torch.device(found.type, torch.accelerator.current_device_index())
    return found


def _place(model: nn.Module, layers: Sequence[HostLayer], optimizer: Optimizer, device: torch.device) -> None:
    """Move to the device what is in no layer, and all buffers; and the optimizer's state to its parameters."""
    on_host = {id(parameter) for layer in layers for parameter in layer.parameters}
    for parameter in model.parameters():
        if id(parameter) not in on_host:
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    for group in optimizer.param_groups:
        counts_there = bool(group.get("fused") or group.get("capturable"))
        for moved in group["params"]:
            state = optimizer.state.get(moved, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == moved.shape:
                    # With other strides, a fused optimizer would take one element for another.
                    state[name] = torch.empty_like(moved, dtype=value.dtype).copy_(value)
                elif isinstance(value, Tensor) and name == "step":
                    state[name] = value.to(moved.device if counts_there else "cpu")


def _check_host_memory(
    layers: dict[str, nn.Module], optimizer: Optimizer, dtype: torch.dtype | None, in_backward: bool
) -> None:
    """Check that the layers, their gradients and the optimizer's state have room on the host.

    Raises:
        InputError: they have not.
    """
    elements = sum(parameter.numel() for module in layers.values() for parameter in module.parameters())
    if not elements:
        return
    own_bytes = sum(p.nbytes for module in layers.values() for p in module.parameters())
    already = sum(p.nbytes for module in layers.values() for p in module.parameters() if p.is_cpu)
    travels = own_bytes if dtype is None else elements * dtype.itemsize
    states = 2 if "betas" in optimizer.defaults else int(bool(optimizer.defaults.get("momentum")))
    moving = 0 if optimizer.state else states * own_bytes
    # What travels as it is lies in the link's buffer and nowhere else.
    needed = own_bytes - already + (0 if dtype is None else travels) + moving + (0 if in_backward else travels)
    available = available_host_bytes()
    if available is not None and needed > available:
        raise InputError(
            f"layer to layer needs {binary(needed)} more on the host for {len(layers)} layers (weights and gradients "
            f"on the link, values, state of {type(optimizer).__name__}), and {binary(available)} are available there: "
            "train on a host with more memory" + ("" if in_backward else ", or with optimizer_in_backward=True")
        )


def available_host_bytes() -> int | None:
    """Return how many bytes can be allocated on the host, or None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            said = next(line for line in lines if line.startswith("MemAvailable:"))
        found = int(said.split()[1]) << 10
    except (OSError, StopIteration):
        return None
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            texts = [Path(path).read_text(encoding="ascii").strip() for path in (limit, used)]
        except OSError:
            continue
        if all(text.isdigit() for text in texts):
            found = min(found, max(0, int(texts[0]) - int(texts[1])))
    return found
