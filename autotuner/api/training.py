"""Training steps of whole models: compiled, tuned, and on CUDA captured as one CUDA graph."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack
from weakref import WeakSet

import torch
from torch import Tensor, nn

from autotuner.api.backend import compile_graph
from autotuner.api.caches import hook_recorders, without_cache
from autotuner.api.knowledge import Given
from autotuner.api.layer_drop import draw_for_no_layer
from autotuner.api.options import check_examples, chosen
from autotuner.api.telling import Teller, show
from autotuner.errors import InputError
from autotuner.extras import needed_for
from autotuner.runtime.batches import moved_to
from autotuner.runtime.data_parallel import Together, together
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.gradient_exchange import GradientExchange
from autotuner.runtime.optimizer_parts import needs_closure, refusal_of_parts
from autotuner.runtime.own_code import with_own_code
from autotuner.runtime.padding.calls import PaddedCalls
from autotuner.runtime.padding.rules import leaves_out_ignored
from autotuner.runtime.plain_step import Loss
from autotuner.runtime.processes import Peers
from autotuner.runtime.updates_in_backward import UpdatesInBackward
from autotuner.runtime.whole_step import WholeStep
from autotuner.settings import TuneKeywords, TuneOptions, parsed_bytes

if TYPE_CHECKING:
    from autotuner.fleet.tuning import Fleet
    from autotuner.server.client import Client
    from autotuner.tuner import Watch


STEPS: "WeakSet[WholeStep]" = WeakSet()
"""The training steps of this process."""


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    example_inputs: Any = None,
    max_norm: float | None = None,
    capture: bool = True,
    max_graphs: int = 4,
    memory_budget: int | str | None = None,
    optimizer_in_backward: bool = False,
    pad_batches: bool = True,
    process_group: Any = None,
    clip_per_bucket: bool = False,
    shard_optimizer: bool = False,
    database: str | Path | None = None,
    server: "str | Client | None" = None,
    configurations: Given | None = None,
    compiler: str = "inductor",
    threads: int | None = None,
    space: str | Path | None = None,
    watch: "Watch | None" = show,
    fleet: "Fleet | None" = None,
    **tuning: Unpack[TuneKeywords],
) -> WholeStep:
    """Return a function that runs a training step: forward, loss, backward, clipping, the optimizer's step.

    On CUDA the step becomes one CUDA graph at its third call with batches of one shape. Each call is one training step,
    also those before. What cannot be captured runs as a plain compiled step, and a `TunedWarning` says why. On the CPU
    all steps are plain. Gradients are None before and after a step. Where steps are captured, parameters that a plan
    reads as one, such as query, key and value weights, move into one block of memory when the model is compiled: they
    stay the same objects, each with a storage of its own.

    Args:
        model: whose parameters the optimizer moves. One that torch.compile has compiled stays as it is; any other is
            compiled with this package's backend.
        optimizer: on CUDA one of torch's with an option `capturable`, which is switched on, or SGD.
        loss: returns the loss of a model and a batch. By default, the model is called with the batch (a mapping as
            keyword arguments, a tuple or list as positional ones), and returns the loss, alone or as `.loss`. Nothing
            else of what it returns is read, so a model of transformers is called with `use_cache=False`, unless the
            batch says otherwise: keys and values for a cache would be copied, and get gradients of zeros.
        example_inputs: a batch; the regions in its step are tuned here and now, unless the database knows them: of
            several processes, by the first on each host, whose database the others on it read.
        max_norm: gradients are scaled down where the norm of all of them is larger.
        capture: whether steps become CUDA graphs.
        max_graphs: so many shapes (and modes, and hyperparameters) have a graph each; steps of further ones are plain.
        memory_budget: what a step may need, in bytes or as in "16GiB": everything that torch has allocated on the
            device, parameters, gradients and the optimizer's state among it. The first steps measure what is needed;
            then the regions run as fast as that leaves room for. `print(step)` says how.
        optimizer_in_backward: whether parameters are updated during backward, as soon as 64 MiB of gradients are there,
            and these gradients go: so not all of them are there at once, where the step is captured or has a budget.
            Losses and parameters are those of the optimizer's own step, bit by bit. For one process, with an optimizer
            of torch, and without `max_norm`, which needs all gradients first.
        pad_batches: whether a batch of a new shape is padded to a larger one that is compiled, or was tuned by
            `example_inputs`, instead of being compiled itself. For batches by name, as transformers' collate functions
            make them (`input_ids`, `attention_mask`, `labels` ...). Before that, a few tokens run with and without
            padding: where their losses or gradients differ, nothing is padded. Where padded calls have lost as much
            time as compiling takes, one more shape is compiled. What they lose is the measured time of the larger
            shape's step, by the share of tokens that was added; the time of a shape that never ran is estimated by its
            tokens.
            `print(step)` says how many calls were padded, and why others were not.
        process_group: of torch: processes that train the model together, each with batches of its own, under torchrun,
            say. All of torch's default group by default. Gradients are averaged over them, in buckets, while backward
            goes on; a model in DistributedDataParallel is unwrapped for that. All of them call this function, and each
            step, together; parameters and buffers are those of the first. FSDP exchanges by itself. A group of this
            process alone exchanges nothing.
        clip_per_bucket: whether each process clips each bucket of its own gradients, to its share of `max_norm`, before
            they are exchanged. Other values than those of `max_norm` alone. No effect in one process; nor has the next.
        shard_optimizer: whether each process keeps the optimizer's state of some parameters only, updates these, and
            sends them to the others (ZeRO, stage 1). `step.optimizer_state()` returns all of it.
        database: as in `optimize`; so are server, configurations, compiler, threads, space, watch, fleet and tuning.

    Raises:
        InputError: several of database, server and configurations; example inputs with one of the last two; an unknown
            compiler; a budget that is no number of bytes, or is for a model that is compiled already; an optimizer
            whose step needs a closure;
            `optimizer_in_backward` or `shard_optimizer` with an optimizer that cannot be stepped in parts, the first
            also with `max_norm` or several processes; `clip_per_bucket` without `max_norm`; either where FSDP, say,
            exchanges gradients; processes with other models.
        PeerLostError: here, and in each step: another process has ended.
        BudgetError: at the second or third step of a shape: it needs more, however its regions run.
    """
    check_examples(example_inputs, server, configurations)
    asked = TuneOptions.of(**tuning)  # unknown options end here, also where nothing is tuned
    budget_bytes = parsed_bytes(memory_budget, "memory_budget")
    if optimizer_in_backward and max_norm is not None:
        raise InputError(
            f"max_norm={max_norm:g} needs the norm of all gradients before the first update, and optimizer_in_backward "
            "updates before all are there: give one of the two"
        )
    if clip_per_bucket and max_norm is None:
        raise InputError(
            "clip_per_bucket divides max_norm among buckets of gradients, and none is given: give max_norm"
        )
    in_backward = UpdatesInBackward(optimizer, group=process_group) if optimizer_in_backward else None
    shared = together(model, process_group)
    check_together(
        shared, optimizer, in_backward=optimizer_in_backward, per_bucket=clip_per_bucket, shards=shard_optimizer
    )
    if needs_closure(optimizer):
        raise InputError(
            f"{type(optimizer).__name__} computes the loss several times in a step, and training_step computes it "
            "once: give one whose step() needs no closure, such as AdamW, or write a loop around optimize(model)"
        )
    model, peers = shared.model, None if shared.group is None else Peers(shared.group)
    options = chosen(database, server, configurations, compiler, asked) | {"quiet": watch is not show}
    trace_past_notes(model)
    hook_recorders(model)
    draw_for_no_layer(model)
    objective = objective_of(model, loss or partial(called, **without_cache(model)))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    is_compiled = isinstance(model, torch._dynamo.OptimizedModule)
    if is_compiled and budget_bytes is not None:
        raise InputError(
            "memory_budget decides how a model is compiled, and this one is compiled already: give training_step the "
            "model that torch.compile was given"
        )
    if example_inputs is not None:
        batch = moved_to(example_inputs, device)
        with needed_for("tuning"):
            from autotuner.api.tuning import Effort, tune_calls

        effort = Effort(database=database, threads=threads, space=space, fleet=fleet, tuning=tuning)
        tunes = partial(tune_calls, objective, [(batch,)], device.type, effort, Teller(watch), model)
        tunes() if peers is None else peers.once_per_host(tunes)

    def compiled(whole: bool) -> Loss:
        if is_compiled:
            return objective
        given = {**options, "capture": "step"} if whole else dict(options)
        if budget_bytes is not None:
            given["budget"] = True
        made: Loss = torch.compile(objective, backend=compile_graph, options=given, dynamic=False)
        return made

    runtime = device_runtime(device)
    captures = capture and runtime.has_graphs
    ignores = loss is None and leaves_out_ignored(model)
    shapes = min(max_graphs, torch._dynamo.config.recompile_limit) if captures else torch._dynamo.config.recompile_limit
    padded_calls = PaddedCalls(model, objective, device, ignores, shapes, process_group) if pad_batches else None
    exchange = None
    if peers is not None:
        exchange = GradientExchange(
            model, optimizer, peers, runtime, max_norm=max_norm, per_bucket=clip_per_bucket,
            shards=shard_optimizer, is_equal=shared.is_equal,
        )  # fmt: skip
    step = WholeStep(
        model, optimizer, compiled(captures), max_norm=max_norm, recorder=runtime if captures else None,
        max_graphs=max_graphs, uncaptured=lambda: compiled(False), budget_bytes=budget_bytes,
        in_backward=in_backward, padded_calls=padded_calls, exchange=exchange, refused=shared.refused,
    )  # fmt: skip
    if example_inputs is not None:
        step.expect(batch)
    STEPS.add(step)
    return step


def check_together(
    shared: Together, optimizer: torch.optim.Optimizer, *, in_backward: bool, per_bucket: bool, shards: bool
) -> None:
    """Check what is asked of several processes.

    Raises:
        InputError: as `training_step`.
    """
    for name, is_given in {"clip_per_bucket": per_bucket, "shard_optimizer": shards}.items():
        if is_given and shared.refused is not None:
            raise InputError(f"{name} is for gradients that the step exchanges, and {shared.refused}: leave it out")
    if in_backward and shared.group is not None:
        raise InputError(
            "optimizer_in_backward updates a parameter before several processes have exchanged its gradient: "
            "leave it out where they train one model; shard_optimizer saves memory there"
        )
    reason = refusal_of_parts(optimizer) if shards else None
    if reason is not None:
        raise InputError(f"shard_optimizer has each process move some parameters, and {reason}, or leave it out")


def called(model: Any, batch: Any, **keywords: Any) -> Tensor:
    """Call a model with a batch, and return the loss that it computes.

    Args:
        keywords: beside those of a batch that is a mapping, which win.

    Raises:
        InputError: it computes none.
    """
    if isinstance(batch, Mapping):
        found = model(**keywords | dict(batch))
    else:
        found = model(*batch) if isinstance(batch, list | tuple) else model(batch)
    loss = found if isinstance(found, Tensor) else getattr(found, "loss", None)
    if not isinstance(loss, Tensor):
        raise InputError(f"the model returns a {type(found).__name__} without a loss: give training_step a loss")
    return loss


def trace_past_notes(model: Any) -> None:
    """Have dynamo trace past what transformers logs once: GPT-2 does beside its loss, and the graph would be cut there.

    What it logs there, it logs here.
    """
    once = getattr(logging.Logger, "warning_once", None)
    if once is not None and getattr(getattr(model, "_orig_mod", model), "loss_function", None) is not None:
        torch._dynamo.config.ignore_logger_methods.add(_Named(once))  # type: ignore[arg-type]


class _Named(str):
    """The name of a function, which is found as the function is: dynamo writes its settings down, and copies them."""

    function: Any

    def __new__(cls, function: Any) -> "_Named":
        made = super().__new__(cls, function.__qualname__)
        made.function = function
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)

    def __deepcopy__(self, _: Any) -> "_Named":
        return self

    def __eq__(self, other: object) -> bool:
        return other is self.function or (isinstance(other, _Named) and other.function is self.function)

    def __hash__(self) -> int:
        return hash(self.function)


def objective_of(model: nn.Module, loss: Callable[[Any, Any], Tensor]) -> Loss:
    """Return the function of a batch that is compiled."""

    def objective(batch: Any) -> Tensor:
        return loss(model, batch)

    return with_own_code(objective)
