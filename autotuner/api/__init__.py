"""The public API: tune a model on this machine, and run the configuration as a module that trains."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from autotuner.api.knowledge import Given, best_known, loaded
from autotuner.api.layers import as_model
from autotuner.api.telling import show
from autotuner.errors import AutotunerError, InputError, ModelError, NotFoundError, TunedWarning, stacklevel
from autotuner.extras import needed_for
from autotuner.ir.models import load_model
from autotuner.plan.configuration import Configuration, load_configuration, save_configuration
from autotuner.settings import Limits, TuneKeywords, TuneOptions, parsed_bytes, server_url

if TYPE_CHECKING:
    from torch import nn

    from autotuner.fleet.tuning import Fleet
    from autotuner.runtime import Summary
    from autotuner.server.client import Client
    from autotuner.tuner import Watch

__all__ = [
    "Limits", "TuneOptions", "apply", "check", "load_configuration", "load_model", "module", "optimize", "restore",
    "save_configuration", "summary",
]  # fmt: skip


def optimize(
    model: "nn.Module",
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    database: str | Path | None = None,
    server: "str | Client | None" = None,
    configurations: Given | None = None,
    compiler: str = "inductor",
    graphs: bool = True,
    fullgraph: bool = False,
    memory_budget: int | str | None = None,
    device: str | None = None,
    threads: int | None = None,
    space: str | Path | None = None,
    watch: "Watch | None" = show,
    fleet: "Fleet | None" = None,
    **tuning: Unpack[TuneKeywords],
) -> Any:
    """Return a model whose known regions run tuned, and the rest of which another compiler compiles.

    It is `torch.compile(model, backend="autotuner", dynamic=False)`, after a tuning where example inputs are given.

    Args:
        example_inputs: as in `tune`; the regions in this call are tuned here and now, unless the database knows them.
        database: where configurations are known; or else
        server: URL of a service, or a client of it: it tunes what is not known, for a later compilation; or else
        configurations: what a tuning returned, or paths of files: nothing else is asked.
        compiler: of the rest: "inductor", "aot_eager" or "eager".
        graphs: whether tuned regions become CUDA graphs; ignored on the CPU.
        fullgraph: whether a graph break is an error.
        memory_budget: what a training step may need, in bytes or as in "16GiB": everything that torch has allocated on
            the device, parameters, gradients and the optimizer's state among it. A step begins with the first call that
            records gradients, and ends when the optimizers have stepped, which are of torch. The first steps measure
            what is needed; then the regions run as fast as that leaves room for. `summary` says how. `training_step`
            has an argument of this name for steps that it runs.
        device: as in `tune`; so are threads, space, fleet and tuning.
        watch: called with the progress of a tuning, as in `tune`. Where it is given, or None, compiling is silent too.

    Raises:
        InputError: several of database, server and configurations; example inputs with one of the last two; an unknown
            compiler; a budget that is no number of bytes.
        BudgetError: at the end of the second or third step of a shape, in the optimizer's `step`: it needs more,
            however its regions run.
    """
    with needed_for("compiling a model"):
        import torch

        from autotuner.api.backend import compile_graph
        from autotuner.api.layer_drop import draw_for_no_layer
        from autotuner.api.options import check_examples, chosen

    asked = TuneOptions.of(**tuning)  # an unknown one ends here, also where nothing is tuned
    check_examples(example_inputs, server, configurations)
    options = chosen(database, server, configurations, compiler, asked)
    options |= {"graphs": graphs, "quiet": watch is not show}
    draw_for_no_layer(model)
    budget_bytes = parsed_bytes(memory_budget, "memory_budget")
    options |= {} if budget_bytes is None else {"memory_budget": budget_bytes}
    if example_inputs is not None:
        with needed_for("tuning"):
            from autotuner.api.tuning import tune

        tune(
            model, example_inputs, database=database, device=device, threads=threads, space=space, watch=watch,
            fleet=fleet, **tuning,
        )  # fmt: skip
    return torch.compile(model, backend=compile_graph, options=options, dynamic=False, fullgraph=fullgraph)


def apply(
    module: "nn.Module",
    configuration: Given | None = None,
    *,
    server: "str | Client | None" = None,
    extents: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None,
    graphs: bool = True,
) -> "nn.Module":
    """Return a drop-in for a module that runs a configuration, or several, each for other calls.

    The module may be of any class whose forward has regions: give what `tune(module, example_inputs)` returned. A
    configuration of a model file, such as `bert-encoder`, runs where a region computes the same; layers of known
    classes, nn.TransformerEncoderLayer and transformers' BertLayer and those like it, are checked against it at once.
    The drop-in shares parameters and submodules with the module; `restore` is the way back. A call that no
    configuration is for runs the original's code, with a `TunedWarning`.

    With a server, which is for layers of known classes, the configuration is the best that it knows for the module and
    these extents on this machine's device; of several extents, each that it knows. Where it knows none that fits, or
    cannot be reached, the module itself is returned, and a `TunedWarning` says why.

    Args:
        configuration: tuned for the module, or the path of its file; several, each for another shape of the input, for
            eval mode beside train mode, or for calls with a mask; or else
        server: URL of a service, or a client of it.
        extents: with a server, elements along the axes that a module does not know: `b` and `l`; several for several
            shapes of the input.
        graphs: on CUDA, replay forward and backward as CUDA graphs; ignored on the CPU.

    Raises:
        InputError: neither configuration nor server is given, or both; what is given is of another type; extents beside
            a configuration.
        ModelError: a server, and extents that lack `b` or `l`, or contradict the module.
        ConfigurationError: a configuration of another module, or for another device; the message lists what differs.
            Or the module's own forward was replaced, and so would never run the configuration.
    """
    with needed_for("running a configuration"):
        from autotuner.api.applying import apply as run

    if configuration is not None and server is None:
        if extents is not None:
            raise InputError("extents go with a server: a configuration has its own")
        return run(module, loaded(configuration), graphs=graphs)
    if configuration is not None or server is None:
        raise InputError("give apply a configuration or a server that knows one: one of the two")
    if isinstance(server, str):
        server_url(server)
    elif not hasattr(server, "best"):
        raise InputError(f"server is {server!r}: give the URL of a service, or an autotuner.server.client.Client")
    shapes = _shapes(extents)
    try:
        models = [as_model(module, shape, None, None) for shape in shapes]
    except ModelError:
        raise
    except AutotunerError as error:
        warnings.warn(f"the module stays as it is: {error}", TunedWarning, stacklevel=stacklevel())
        return module
    found: list[Configuration] = []
    notes: list[str] = []
    tuned = module
    try:
        for model in models:
            try:
                best, note = best_known(module, model, server)
            except NotFoundError as error:
                notes.append(str(error))
            else:
                found.append(best)
                notes += [note] if note else []
        if found:
            tuned = run(module, found, graphs=graphs)
    except AutotunerError as error:
        notes = [str(error)]
    if tuned is module:
        notes[:1] = [f"the module stays as it is: {notes[0]}"]
    for note in notes:
        warnings.warn(note, TunedWarning, stacklevel=stacklevel())
    return tuned


def module(configuration: Given, *, graphs: bool = True) -> "nn.Module":
    """Return a module with a model file's parameters, which runs configurations of it; see `ModelModule`.

    Args:
        configuration: of a model of any definition, or the path of its file; several, each for other shapes of the
            inputs, or without dropout for eval mode.
        graphs: on CUDA, replay forward and backward as CUDA graphs; ignored on the CPU.

    Raises:
        ConfigurationError: several, of models that differ in more than extents and options.
    """
    with needed_for("running a configuration"):
        from autotuner.runtime.model_module import ModelModule

    return ModelModule(loaded(configuration), graphs=graphs)


def _shapes(extents: Mapping[str, int] | Sequence[Mapping[str, int]] | None) -> list[Mapping[str, int] | None]:
    """Return the extents of each shape of the input; one that is not given is None."""
    shapes: list[Any] = list(extents) if isinstance(extents, list | tuple) else [extents]
    if not shapes or any(shape is not None and not isinstance(shape, Mapping) for shape in shapes):
        raise InputError(
            f"extents is {extents!r}: give a mapping of b and l, or a list of one for each shape of the input"
        )
    return shapes


def check(configuration: Configuration, seed: int = 0) -> Any:
    """Compare a configuration with the framework's module in float64; see `autotuner.runtime.check`."""
    with needed_for("checking a configuration"):
        from autotuner.runtime import check as run

    return run(configuration, seed)


def restore(module: "nn.Module") -> "nn.Module":
    """Return the module that a tuned one was made from, or a model with all its tuned layers restored in place."""
    with needed_for("restoring a module"):
        from autotuner.runtime import restore as run

    return run(module)


def summary(module: "nn.Module | None" = None) -> "Summary":
    """Return how the calls of a model's tuned layers ran, or of all in this process; printed, it says what to do.

    Of compiled models it says which regions run tuned, what share of the forward's flop that is, and what of which
    modules is left out and why; `coverage` has the same as values. Of steps that `training_step` made, it says what
    share of their measured time tuned regions take, and how many of their calls were padded. Of one model, it is about
    the graphs that were compiled for it: a graph that torch shares among models of one class counts for the first of
    them.
    """
    with needed_for("a summary of what ran"):
        from autotuner.runtime import summary as run

    found = run(module)
    backend = sys.modules.get("autotuner.api.backend")
    layered = sys.modules.get("autotuner.api.layer_to_layer")
    if backend is not None:
        weights = [] if module is None else list(module.parameters())
        if layered is not None and module is not None:
            weights += [each for step in layered.STEPS if step.trains(module) for each in step.weights()]
        told = [each for each in backend.COMPILED if module is None or each.reads_any(weights)]
        found = replace(found, graphs=tuple(told))
    training = sys.modules.get("autotuner.api.training")
    if training is not None:
        steps = [step for step in training.STEPS if module is None or step.trains(module)]
        shares = tuple(share for step in steps if (share := step.share) is not None)
        paddings = tuple(padding for step in steps if str(padding := step.padding))
        found = replace(found, steps=shares, paddings=paddings)
    loops = sys.modules.get("autotuner.runtime.loop_budget")
    if loops is not None:
        own = None if module is None else list(module.parameters())
        found = replace(found, needs=loops.needs_of(own))
    return found
