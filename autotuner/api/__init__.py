"""The public API: tune a model on this machine, and run the configuration as a module that trains."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from autotuner.database import open_database
from autotuner.errors import AutotunerError, InputError, ModelError, NotFoundError, TunedWarning, stacklevel
from autotuner.ir.models import Model, load_model, named_model
from autotuner.ir.records import Scalar
from autotuner.measure.devices import environment
from autotuner.plan.configuration import Configuration, load_configuration, save_configuration
from autotuner.plan.request import Request
from autotuner.server.worker import tune_attended
from autotuner.settings import Limits, Settings, TuneKeywords, TuneOptions, server_url
from autotuner.space import space_file
from autotuner.tuner import Progress, Watch

if TYPE_CHECKING:
    from torch import nn

    from autotuner.runtime import Summary
    from autotuner.server.client import Client

__all__ = [
    "Limits", "Progress", "TuneOptions", "apply", "check", "load_configuration", "load_model", "optimize", "restore",
    "save_configuration", "summary", "tune",
]  # fmt: skip


@overload
def tune(
    model: "str | Model | nn.Module",
    example_inputs: None = None,
    *,
    extents: Mapping[str, int] | None = None,
    options: Mapping[str, Scalar] | None = None,
    dtype: str | None = None,
    mode: str = "train",
    database: str | Path | None = None,
    device: str | None = None,
    threads: int | None = None,
    space: str | Path | None = None,
    watch: Watch = lambda _: None,
    **tuning: Unpack[TuneKeywords],
) -> Configuration: ...


@overload
def tune(
    model: "nn.Module",
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    database: str | Path | None = None,
    device: str | None = None,
    threads: int | None = None,
    space: str | Path | None = None,
    watch: Watch = lambda _: None,
    **tuning: Unpack[TuneKeywords],
) -> list[Configuration]: ...


def tune(
    model: "str | Model | nn.Module",
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    extents: Mapping[str, int] | None = None,
    options: Mapping[str, Scalar] | None = None,
    dtype: str | None = None,
    mode: str = "train",
    database: str | Path | None = None,
    device: str | None = None,
    threads: int | None = None,
    space: str | Path | None = None,
    watch: Watch = lambda _: None,
    **tuning: Unpack[TuneKeywords],
) -> Configuration | list[Configuration]:
    """Tune a model on this machine and return the best configuration found.

    With example inputs, `model` may be any module: it is called once, the regions that can be tuned are found in what
    it does, and the configurations of these are returned. `torch.compile(model, backend="autotuner")` then runs them.

    Args:
        model: "bert-encoder:tiny", a `Model`, or a module that `apply` takes (`extents` must then give `b` and `l`).
        example_inputs: positional arguments of a module's call, or a mapping of keyword arguments. A configuration is
            for their shapes, and for the mode that the module is in; `extents`, `options`, `dtype` and `mode` do not
            go with them.
        extents: elements along axes, in place of the preset's.
        options: of the model file, in place of its defaults.
        dtype: of inputs, parameters and activations.
        mode: "train", or "eval" for a module's calls in eval mode, in which nothing is dropped.
        database: URL or path of an SQLite file; by default `AUTOTUNER_DATABASE` or ./autotuner.sqlite.
        device: device type: "cpu" or "cuda"; by default where the module's parameters are, of a named model "cpu".
        threads: that a kernel may use; by default `AUTOTUNER_THREADS` or all cores.
        space: path of a search space file; by default that of the device type.
        watch: called with the progress.
        tuning: the fields of `autotuner.TuneOptions`, such as `gap=0.05` or `budget_bytes=2**30`.

    Raises:
        InputError: example inputs for what is no module, or beside arguments that do not go with them.
        AutotunerError: the tree in `autotuner.errors` says what.
    """
    if example_inputs is None:
        return _tune_one(model, extents, options, dtype, mode, database, device, threads, space, watch, tuning)
    if isinstance(model, str | Model):
        raise InputError(f"example inputs are for a module's call, and {model!r} is none: leave them out")
    if (extents, options, dtype, mode) != (None, None, None, "train"):
        raise InputError("extents, options, dtype and mode follow from the example inputs: leave them out")
    from autotuner.api.backend import record

    device = device or _device_type(model)
    return [
        _tune_one(region, None, None, None, "train", database, device, threads, space, watch, tuning)
        for region in record(model, example_inputs)
    ]


def optimize(
    model: "nn.Module",
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    database: str | Path | None = None,
    server: "str | Client | None" = None,
    compiler: str = "inductor",
    graphs: bool = True,
    fullgraph: bool = False,
    watch: Watch = lambda _: None,
    **tuning: Unpack[TuneKeywords],
) -> Any:
    """Return a model whose known regions run tuned, and the rest of which another compiler compiles.

    It is `torch.compile(model, backend="autotuner", dynamic=False)`, after a tuning where example inputs are given.

    Args:
        example_inputs: as in `tune`; the regions in this call are tuned here and now, unless the database knows them.
        database: where configurations are known; or else
        server: URL of a service, or a client of it: it tunes what is not known, for a later compilation.
        compiler: of the rest: "inductor", "aot_eager" or "eager".
        graphs: whether tuned regions become CUDA graphs; ignored on the CPU.
        fullgraph: whether a graph break is an error.
        watch: called with the progress of a tuning.
        tuning: as in `tune`.

    Raises:
        InputError: both a database and a server; example inputs with a server; an unknown compiler.
    """
    import torch

    from autotuner.api.backend import checked, compile_graph

    if example_inputs is not None and server is not None:
        raise InputError("a service tunes on its own machines: give example inputs or a server, one of the two")
    given = {"database": None if database is None else str(database), "server": server}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    options |= {"compiler": compiler, "graphs": graphs}
    checked(options)
    if example_inputs is not None:
        tune(model, example_inputs, database=database, watch=watch, **tuning)
    return torch.compile(model, backend=compile_graph, options=options, dynamic=False, fullgraph=fullgraph)


def _tune_one(
    model: "str | Model | nn.Module",
    extents: Mapping[str, int] | None,
    options: Mapping[str, Scalar] | None,
    dtype: str | None,
    mode: str,
    database: str | Path | None,
    device: str | None,
    threads: int | None,
    space: str | Path | None,
    watch: Watch,
    tuning: TuneKeywords,
) -> Configuration:
    device = device or _device_type(model)
    environment(device)  # before anything else, since without the device there is nothing to do
    wanted = _as_model(model, extents, options, dtype, mode)
    request = Request(wanted, device, options=TuneOptions.of(**tuning))
    settings = Settings.from_environment()
    settings = replace(settings, threads=threads if threads is not None else settings.threads)
    file = space_file(device, space)
    with open_database(database if database is not None else settings.database_url) as opened:
        found = tune_attended(request, opened, file, settings, watch=watch)
    if found.doubts:
        reasons = " ".join(doubt.sentence for doubt in found.doubts)
        warnings.warn(
            f"the configuration is doubtful, and the next tuning measures again what is: {reasons}",
            TunedWarning,
            stacklevel=stacklevel(),
        )
    return found


def _device_type(model: "str | Model | nn.Module") -> str:
    """Return the type of the device that a module is on, "cpu" where it has no memory yet, or is no module."""
    if isinstance(model, str | Model):
        return "cpu"
    from torch import nn

    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return "cpu" if first is None or first.device.type == "meta" else str(first.device.type)


def _as_model(
    model: "str | Model | nn.Module",
    extents: Mapping[str, int] | None,
    options: Mapping[str, Scalar] | None,
    dtype: str | None,
    mode: str = "train",
) -> Model:
    if mode not in ("train", "eval"):
        raise InputError(f'mode is {mode!r}: give "train" or "eval"')
    if mode == "eval" and isinstance(model, str | Model):
        raise InputError(f"{model!r} has no mode: set the options of its dropout to 0, or give a module")
    if isinstance(model, Model):
        return model
    if isinstance(model, str):
        return named_model(model, extents=extents, options=options, dtype=dtype)
    from autotuner.runtime import DROPOUTS, describe

    name, found, read, own_dtype = describe(model)
    if mode == "eval":
        read = {option: 0.0 if option in DROPOUTS else value for option, value in read.items()}
    missing = [axis for axis in ("b", "l") if axis not in (extents or {})]
    if missing:
        raise ModelError(f"a module does not say how large its batches are: give extents for {' and '.join(missing)}")
    for axis, extent in (extents or {}).items():
        if axis in found and extent != found[axis]:
            raise ModelError(f"extents give {axis}={extent}, and the module's own is {found[axis]}: leave it out")
    return load_model(name).instantiate(
        None, extents={**found, **(extents or {})}, options={**read, **(options or {})}, dtype=dtype or own_dtype
    )


def apply(
    module: "nn.Module",
    configuration: Configuration | str | Path | Sequence[Configuration | str | Path] | None = None,
    *,
    server: "str | Client | None" = None,
    extents: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None,
    graphs: bool = True,
) -> "nn.Module":
    """Return a drop-in for a module that runs a configuration; see `autotuner.runtime.apply`.

    With a server, the configuration is the best that it knows for the module and these extents on this machine's
    device; of several extents, each that it knows. Where it knows none that fits, or cannot be reached, the module
    itself is returned, and a `TunedWarning` says why.

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
        ConfigurationError: a configuration of another layer; the message lists what differs.
    """
    from autotuner.api.knowledge import best_known
    from autotuner.runtime import apply as run

    if configuration is not None and server is None:
        if extents is not None:
            raise InputError("extents go with a server: a configuration has its own")
        return run(module, _loaded(configuration), graphs=graphs)
    if configuration is not None or server is None:
        raise InputError("give apply a configuration or a server that knows one: one of the two")
    if isinstance(server, str):
        server_url(server)
    elif not hasattr(server, "best"):
        raise InputError(f"server is {server!r}: give the URL of a service, or an autotuner.server.client.Client")
    shapes = _shapes(extents)
    try:
        models = [_as_model(module, shape, None, None) for shape in shapes]
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


def _loaded(configuration: Configuration | str | Path | Sequence[Configuration | str | Path]) -> list[Configuration]:
    """Return configurations as `apply` takes them; those given as paths are read."""
    loaded: list[Configuration] = []
    for given in configuration if isinstance(configuration, list | tuple) else [configuration]:
        if isinstance(given, str | Path):
            loaded.append(load_configuration(given))
        elif isinstance(given, Configuration):
            loaded.append(given)
        else:
            raise InputError(f"{given!r} is no configuration: give one, the path of its file, or a list of these")
    return loaded


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
    from autotuner.runtime import check as run

    return run(configuration, seed)


def restore(module: "nn.Module") -> "nn.Module":
    """Return the module that a tuned one was made from, or a model with all its tuned layers restored in place."""
    from autotuner.runtime import restore as run

    return run(module)


def summary(module: "nn.Module | None" = None) -> "Summary":
    """Return how the calls of a model's tuned layers ran, or of all in this process; printed, it says what to do.

    Without a model, it also says which regions of compiled models run tuned.
    """
    from autotuner.runtime import summary as run

    found = run(module)
    backend = sys.modules.get("autotuner.api.backend")
    if module is None and backend is not None:
        found = replace(found, graphs=tuple(str(each) for each in backend.COMPILED))
    return found
