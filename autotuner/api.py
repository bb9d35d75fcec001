"""What `import autotuner` offers: the walk with a real measurer, and its result as a module that trains."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotuner import tuner
from autotuner.analysis import working_set_bytes
from autotuner.configuration import Configuration, load_configuration, save_configuration
from autotuner.database import open_database
from autotuner.device import environment
from autotuner.errors import ConfigurationError, DeviceError, ModelError
from autotuner.graph.autodiff import training_graph
from autotuner.measure import Measurer, cpu_policy
from autotuner.models import Model, load_model, parse_reference, search_spaces_dir
from autotuner.records import Scalar
from autotuner.settings import Settings
from autotuner.space import SpaceFile, load_space
from autotuner.tuner import Progress, Watch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Progress", "apply", "check", "load_configuration", "load_model", "save_configuration", "space_file", "tune"]

END_TO_END_SAMPLES = 30


def space_file(device_type: str, path: str | Path | None = None) -> SpaceFile:
    """Return the search space of a device type, or the one at a path.

    Raises:
        SpaceError: there is none, or it cannot be used.
        DeviceError: the file at the path is for another device type.
    """
    found = load_space(Path(path) if path else search_spaces_dir() / "kernels" / f"{device_type}.yaml")
    if found.device_type != device_type:
        raise DeviceError(f"{path}: it is for device type {found.device_type!r}, asked for is {device_type!r}")
    return found


def rotate_bytes(model: Model) -> int | None:
    """Return through how many bytes of operands a call is timed for this model, None for the policy's least.

    A step finds in cache what it touched last. Between two touches of a tensor lies anything from nothing (made, then
    read) to the whole step (weights, saved tensors): half the step's working set stands for both, rounded down to a
    power of two, so that models of about one size share measurements.
    """
    half = working_set_bytes(training_graph(model.graph())) // 2
    rounded = 1 << (half.bit_length() - 1)
    return rounded if rounded > cpu_policy().rotate_bytes else None


def named_model(
    reference: str,
    *,
    extents: Mapping[str, int] | None = None,
    options: Mapping[str, Scalar] | None = None,
    dtype: str | None = None,
) -> Model:
    """Return the model that a reference such as "bert-encoder:tiny" names, with some of its values replaced.

    Raises:
        ModelError: no such model, preset, axis or option, or a value that is not valid.
    """
    name, preset = parse_reference(reference)
    return load_model(name).instantiate(preset, extents=extents or {}, options=options or {}, dtype=dtype)


def tune(
    model: "str | Model | nn.Module",
    *,
    extents: Mapping[str, int] | None = None,
    options: Mapping[str, Scalar] | None = None,
    dtype: str | None = None,
    database: str | Path | None = None,
    device: str = "cpu",
    threads: int | None = None,
    space: str | Path | None = None,
    watch: Watch = lambda _: None,
    again: bool = False,
    retry: bool = False,
    end_to_end: bool = True,
) -> Configuration:
    """Tune a model on this machine and return the best configuration found.

    Args:
        model: "bert-encoder:tiny", a `Model`, or a module that `apply` takes (`extents` must then give `b` and `l`).
        extents: elements along axes, in place of the preset's.
        options: of the model file, in place of its defaults.
        dtype: of inputs, parameters and activations.
        database: URL or path of an SQLite file; by default `AUTOTUNER_DATABASE` or ./autotuner.sqlite.
        device: device type; "cpu".
        threads: that a kernel may use; by default `AUTOTUNER_THREADS` or all cores.
        space: path of a search space file; by default that of the device type.
        watch: called with the progress.
        again: solve anew instead of answering from the database; measurements are reused all the same.
        retry: measure once more what has failed.
        end_to_end: time the result against the framework, and keep that in the configuration; a model for which the
            framework has no layer is not timed.

    Raises:
        AutotunerError: the tree in `autotuner.errors` says what.
    """
    settings = Settings.from_environment()
    environment(device)
    chosen = _as_model(model, extents, options, dtype)
    file = space_file(device, space)
    threads = threads if threads is not None else settings.threads
    with (
        open_database(database if database is not None else settings.database_url) as opened,
        Measurer(
            threads=threads,
            timeout_s=settings.timeout_s,
            device_type=device,
            cache_dir=settings.cache_dir,
            rotate_bytes=rotate_bytes(chosen),
        ) as measurer,
    ):
        found = tuner.tune(chosen, file, opened, measurer, watch=watch, again=again, retry=retry)
        if end_to_end and found.measured is None and _has_peers(chosen):
            measurer.close()
            from autotuner.runtime import time_peers

            found = tuner.with_measured(found, time_peers(found, END_TO_END_SAMPLES, threads=threads))
            tuner.save(opened, found, tuner.request_key(chosen, file))
    return found


def _has_peers(model: Model) -> bool:
    from autotuner.runtime import encoder_layer

    try:
        encoder_layer(model)
    except ConfigurationError:
        return False
    return True


def _as_model(
    model: "str | Model | nn.Module",
    extents: Mapping[str, int] | None,
    options: Mapping[str, Scalar] | None,
    dtype: str | None,
) -> Model:
    if isinstance(model, Model):
        return model
    if isinstance(model, str):
        return named_model(model, extents=extents, options=options, dtype=dtype)
    from autotuner.runtime import describe

    name, found, read, own_dtype = describe(model)
    missing = [axis for axis in ("b", "l") if axis not in (extents or {})]
    if missing:
        raise ModelError(f"a module does not say how large its batches are: give extents for {' and '.join(missing)}")
    return load_model(name).instantiate(
        None, extents={**found, **(extents or {})}, options={**read, **(options or {})}, dtype=dtype or own_dtype
    )


def apply(module: "nn.Module", configuration: Configuration) -> "nn.Module":
    """Return a drop-in for a module that runs a configuration; see `autotuner.runtime.apply`."""
    from autotuner.runtime import apply as run

    return run(module, configuration)


def check(configuration: Configuration, seed: int = 0) -> Any:
    """Compare a configuration with the framework's module in float64; see `autotuner.runtime.check`."""
    from autotuner.runtime import check as run

    return run(configuration, seed)
