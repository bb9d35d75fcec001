"""Tuning from Python: named models, layers, and the regions in calls of any module."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Unpack, overload

from autotuner.api.knowledge import OfDatabase, device_type_of
from autotuner.api.layers import as_model
from autotuner.api.telling import Teller, show
from autotuner.database import open_database
from autotuner.errors import InputError, TunedWarning, stacklevel
from autotuner.ir.models import Model
from autotuner.ir.numerics import checked_numerics
from autotuner.ir.records import Scalar
from autotuner.measure.devices import environment
from autotuner.plan.configuration import Configuration
from autotuner.plan.request import Request
from autotuner.server.worker import measurer_ahead, measuring_with, tune_attended
from autotuner.settings import Settings, TuneKeywords, TuneOptions
from autotuner.space import space_file
from autotuner.tuner import Watch

if TYPE_CHECKING:
    from torch import nn

    from autotuner.fleet.tuning import Fleet
    from autotuner.measure import Measurer


PART_S = 30.0
"""The least part of a limit that a region has, as long as so much is left: less leaves no time to search. On recorded
times of an H200, the plan of a layer after 60 s is 1 to 10 % slower than the best (`scripts/bench_limits`)."""
LEAST_S = 1.0
"""The least limit of the first region, which is tuned however long reading took."""


class TuningKeywords(TuneKeywords, total=False):
    """The keywords of `tune` that go with every form of its call, for type checkers."""

    database: str | Path | None
    device: str | None
    threads: int | None
    space: str | Path | None
    watch: Watch | None
    fleet: "Fleet | None"


@overload
def tune(
    model: "str | Model | nn.Module",
    example_inputs: None = None,
    *,
    extents: Mapping[str, int] | None = None,
    options: Mapping[str, Scalar] | None = None,
    dtype: str | None = None,
    mode: str = "train",
    **effort: Unpack[TuningKeywords],
) -> Configuration: ...


@overload
def tune(
    model: "nn.Module", example_inputs: Sequence[Any] | Mapping[str, Any], **effort: Unpack[TuningKeywords]
) -> list[Configuration]: ...


@overload
def tune(
    model: "nn.Module", example_inputs: None = None, *, batches: Iterable[Any], **effort: Unpack[TuningKeywords]
) -> list[Configuration]: ...


def tune(
    model: "str | Model | nn.Module",
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    batches: Iterable[Any] | None = None,
    extents: Mapping[str, int] | None = None,
    options: Mapping[str, Scalar] | None = None,
    dtype: str | None = None,
    mode: str = "train",
    database: str | Path | None = None,
    device: str | None = None,
    threads: int | None = None,
    space: str | Path | None = None,
    watch: Watch | None = show,
    fleet: "Fleet | None" = None,
    **tuning: Unpack[TuneKeywords],
) -> Configuration | list[Configuration]:
    """Tune a model on this machine and return the best configuration found.

    With example inputs, `model` may be any module: it is called once, the regions that can be tuned are found in what
    it does, and the configurations of these are returned. `torch.compile(model, backend="autotuner")` then runs them.
    Buffers, such as running means, and generators are put back behind the call.

    Args:
        model: "bert-encoder:tiny", a `Model`, or a layer of a known class (`extents` must then give `b` and `l`).
        example_inputs: positional arguments of a module's call, or a mapping of keyword arguments. A configuration is
            for their shapes, and for the mode that the module is in; `extents`, `options`, `dtype` and `mode` do not
            go with them.
        batches: many example inputs, in place of one: the module is called with each, and all shapes that occur are
            tuned, the most work first. `autotuner.regions` says which these are.
        extents: elements along axes, in place of the preset's.
        options: of the model file, in place of its defaults.
        dtype: of inputs, parameters and activations.
        mode: "train", or "eval" for a module's calls in eval mode, in which nothing is dropped.
        database: URL or path of an SQLite file; by default `AUTOTUNER_DATABASE` or ./autotuner.sqlite.
        device: device type: "cpu" or "cuda"; by default where the module's parameters are, of a named model "cpu".
        threads: that a kernel may use; by default `AUTOTUNER_THREADS` or all cores.
        space: path of a search space file; by default that of the device type.
        watch: called with the progress. By default it is shown on standard error: as a display that changes in place
            at a terminal (one line, where rich is not installed), as lines elsewhere, or as `AUTOTUNER_PROGRESS` says;
            `AUTOTUNER_QUIET=1` and None print nothing.
        fleet: measure on all GPUs of a cluster, as `autotuner.fleet.tuning.Fleet` names it.
        tuning: the fields of `autotuner.TuneOptions`, such as `gap=0.05` or `budget_bytes=2**30`.

    Returns:
        The model's configuration; with `example_inputs` or `batches` a list, of one configuration for each region and
        shape in these calls.

    Raises:
        InputError: example inputs for what is no module, or beside arguments that do not go with them.
        AutotunerError: the tree in `autotuner.errors` says what.
    """
    effort = Effort(database=database, device=device, threads=threads, space=space, fleet=fleet, tuning=tuning)
    teller = Teller(watch)
    if example_inputs is None and batches is None:
        there = effort.device_type(device_type_of(model))  # first, since without the device there is nothing to do
        return effort.spent_on(as_model(model, extents, options, dtype, mode), there, teller)
    if isinstance(model, str | Model):
        raise InputError(f"example inputs are for a module's call, and {model!r} is none: leave them out")
    if (extents, options, dtype, mode) != (None, None, None, "train"):
        raise InputError("extents, options, dtype and mode follow from the example inputs: leave them out")
    if example_inputs is not None and batches is not None:
        raise InputError("example_inputs are one batch, and batches are many: give one of the two")
    from autotuner.api.caches import both_ways

    device_type = device_type_of(model)
    given = both_ways(model, [example_inputs] if batches is None else batches, device_type)
    return tune_calls(model, given, device_type, effort, teller)


def tune_calls(
    called: Callable[..., Any],
    batches: Iterable[Any],
    device_type: str,
    effort: "Effort",
    teller: Teller,
    model: "nn.Module | None" = None,
) -> list[Configuration]:
    """Tune the regions in a module's or function's calls with each of some batches, the most work first.

    A limit of seconds is for all of that, reading included; see `_Limit`. What it leaves out is returned where it is
    known already, and warned of otherwise.

    Args:
        model: that a function calls.
    """
    from autotuner.api.survey import found_in, region_calls

    limit = _Limit(effort.options.limits.seconds, monotonic())
    there = effort.device_type(device_type)
    with effort.measurer(there) as measurer:
        teller.say("reading the model")
        calls = region_calls(called, batches, model)
        models = found_in(calls, called)
        count = len(models)
        teller.say(f"{count} region{'s' * (count > 1)} to tune, with {calls.share} of the flop of the model's forward")
        found: list[Configuration] = []
        for number, each in enumerate(models):
            if number and limit.is_over:
                return found + effort.known_of(models[number:], there, limit)
            place, seconds = f"region {number + 1} of {count}", limit.part_s(count - number)
            found.append(effort.spent_on(each, there, teller, place, seconds=seconds, measurer=measurer))
            limit.waited_s += 0.0 if measurer is None else measurer.waited_s
    return found


@dataclass
class _Limit:
    """A limit of seconds for a whole call: each region has an equal part of what is left.

    Args:
        seconds: None for no limit.
        began: by `time.monotonic`.
        waited_s: for the device, which does not count.
    """

    seconds: float | None
    began: float
    waited_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self._left_s <= 0

    @property
    def _left_s(self) -> float:
        return inf if self.seconds is None else self.seconds - (monotonic() - self.began - self.waited_s)

    def part_s(self, regions: int) -> float | None:
        """Return the limit of the next region of so many: its part, or `PART_S` where that is more and left."""
        left_s = self._left_s
        return None if left_s == inf else max(left_s / regions, min(left_s, PART_S), LEAST_S)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Options of a tuning, each as in `tune`."""

    database: str | Path | None = None
    device: str | None = None
    threads: int | None = None
    space: str | Path | None = None
    fleet: "Fleet | None" = None
    tuning: TuneKeywords = field(default_factory=lambda: TuneKeywords())

    def __post_init__(self) -> None:
        TuneOptions.of(**self.tuning)  # an unknown one ends here, before anything is read

    @property
    def options(self) -> TuneOptions:
        return TuneOptions.of(**self.tuning)

    @property
    def _settings(self) -> Settings:
        settings = Settings.from_environment()
        return replace(settings, threads=self.threads if self.threads is not None else settings.threads)

    @property
    def _stored(self) -> str | Path:
        return self.database if self.database is not None else self._settings.database_url

    def device_type(self, default: str) -> str:
        """Return the type of the device that is used, which is there."""
        device = self.device or default
        if self.fleet is None:
            environment(device)
        return device

    def measurer(self, device: str) -> "AbstractContextManager[Measurer | None]":
        """Return a measurer whose process starts now, while the model is read; none over a fleet, which has its own."""
        return nullcontext() if self.fleet is not None else measurer_ahead(device, self._settings)

    def known_of(self, models: Sequence[Model], device: str, limit: _Limit) -> list[Configuration]:
        """Return what is known of regions that a limit leaves out, and warn of the others."""
        stored = OfDatabase(self._stored, checked_numerics(self.options.numerics), self.options.budget_bytes)
        known = [each for each in stored.find(models, device) if each is not None]
        if len(known) < len(models):
            warnings.warn(
                f"{len(models) - len(known)} of the regions are not tuned: the limit of {limit.seconds:g} s was "
                "reached before their turn; the same call with a higher limit goes on with them",
                TunedWarning,
                stacklevel=stacklevel(),
            )
        return known

    def spent_on(
        self,
        model: Model,
        device: str,
        teller: Teller,
        place: str = "",
        *,
        seconds: float | None = None,
        measurer: "Measurer | None" = None,
    ) -> Configuration:
        """Tune a model.

        Args:
            place: its own among several.
            seconds: its limit, in place of that of all.
            measurer: whose process may be begun; by default one of its own.
        """
        options = self.options
        if seconds is not None:
            options = replace(options, limits=replace(options.limits, seconds=seconds))
        request, settings = Request(model, device, options=options), self._settings
        file = space_file(device, self.space)
        with open_database(self._stored) as opened, teller.telling(place or request.model.reference) as told:
            if self.fleet is None:
                measuring = None if measurer is None else partial(measuring_with, measurer)
                found = tune_attended(request, opened, file, settings, watch=told.watch, measuring=measuring)
            else:
                from autotuner.fleet.tuning import tune_over

                found = tune_over(self.fleet, request, opened, file, settings, watch=told.watch)
            told.found(found)
        if found.doubts:
            reasons = " ".join(doubt.sentence for doubt in found.doubts)
            warnings.warn(
                f"the configuration is doubtful, and the next tuning measures again what is: {reasons}",
                TunedWarning,
                stacklevel=stacklevel(),
            )
        return found
