"""Arguments and options that several commands share, and the values that they stand for."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote

import typer

from autotuner.errors import InputError, ModelError
from autotuner.files import check_writable
from autotuner.ir.numerics import checked_numerics, listed_classes
from autotuner.settings import Limits, TuneKeywords, parsed_bytes, progress_format

if TYPE_CHECKING:
    from autotuner.ir.models import Model
    from autotuner.ir.records import Scalar
    from autotuner.settings import ProgressFormat

Reference = Annotated[
    str, typer.Argument(help="Model and preset, e.g. bert-encoder:tiny, or the path of a model file.")
]
Extent = Annotated[list[str] | None, typer.Option("--extent", help="Elements along an axis, e.g. l=256. Repeatable.")]
Option = Annotated[list[str] | None, typer.Option("--option", help="A model option, e.g. activation=relu. Repeatable.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or float64; by default the model's.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the configuration here.")]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        help="URL, or path of an SQLite file.",
        show_default="$AUTOTUNER_DATABASE, or else autotuner.sqlite",
    ),
]
Device = Annotated[str, typer.Option(help="Device type to tune for; see `devices`.")]
Threads = Annotated[int | None, typer.Option(help="Threads that a kernel may use.", show_default="all cores")]
Budget = Annotated[
    str | None,
    typer.Option(help="The most memory that a step may need beside parameters and inputs, e.g. 512MiB."),
]
NumericsOption = Annotated[
    str,
    typer.Option(
        "--numerics",
        help="What may be saved for backward under a budget: exact"
        + listed_classes(", or {name}, also activations as {numbers}", for_memory=True)
        + listed_classes("; or {name}: products with weights may be of {numbers}", for_memory=False)
        + ".",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
ProgressOption = Annotated[
    str | None,
    typer.Option(
        "--progress",
        help="rich (a live display), lines, json (lines of JSON), none, or auto: rich at a terminal, lines elsewhere. "
        "On standard error.",
        show_default="$AUTOTUNER_PROGRESS, or else auto",
    ),
]
ConfigurationPath = Annotated[Path, typer.Argument(help="A configuration, as `tune --output` writes it.")]


def repetition(
    again: Annotated[bool, typer.Option("--again", help="Solve anew; measurements are reused all the same.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Measure once more what has failed.")] = False,
    remeasure: Annotated[
        bool,
        typer.Option("--remeasure", help="Measure everything anew, whatever is known: for times that you distrust."),
    ] = False,
    end_to_end: Annotated[
        bool, typer.Option(help="Time the result against eager and torch.compile, interleaved.")
    ] = True,
) -> TuneKeywords:
    """Options of a tuning job: what it does once more, and the timing of its result."""
    return {"again": again, "retry": retry, "remeasure": remeasure, "end_to_end": end_to_end}


def effort(
    gap: Annotated[
        float | None,
        typer.Option(
            help="Stop once the plan is proven to take at most this share longer than the best, e.g. 0.05.",
            show_default="measure all that could matter",
        ),
    ] = None,
    estimated_gap: Annotated[
        float | None,
        typer.Option(help="The same by costs learned from what is measured: reached earlier, and no proof, e.g. 0.01."),
    ] = None,
    budget: Budget = None,
    numerics: NumericsOption = "exact",
    exhaustive: Annotated[
        bool,
        typer.Option("--exhaustive", help="Measure everything, also what is proven or expected to make no difference."),
    ] = False,
    max_seconds: Annotated[float | None, typer.Option(help="Stop after so many seconds of measuring.")] = None,
    max_measurements: Annotated[int | None, typer.Option(help="Stop after so many new measurements.")] = None,
) -> TuneKeywords:
    """Options of a tuning job: when it stops, and the memory that its plan may need."""
    return {
        "gap": gap, "estimated_gap": estimated_gap, "budget_bytes": parsed_bytes(budget, "--budget"),
        "numerics": checked_numerics(numerics),
        "exhaustive": exhaustive, "limits": Limits(max_seconds, max_measurements),
    }  # fmt: skip


def with_tuning(*groups: Callable[..., TuneKeywords]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of groups in place of its parameter `tuning`, which gets what the groups return."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(signature(command).parameters.values())
        place = next(number for number, parameter in enumerate(own) if parameter.name == "tuning")
        options = [parameter for group in groups for parameter in signature(group).parameters.values()]
        own[place : place + 1] = options

        @wraps(command)
        def run(**given: Any) -> None:
            tuning: dict[str, Any] = {}
            for group in groups:
                tuning |= group(**{name: given.pop(name) for name in signature(group).parameters})
            command(**given, tuning=tuning)

        shown: Any = run
        shown.__signature__ = Signature([parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own])
        shown.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
        return run

    return decorate


def given_model(
    reference: str, extent: Sequence[str] | None, option: Sequence[str] | None, dtype: str | None
) -> "Model":
    """Return the model that the options name together.

    Raises:
        InputError: a text is not name=value.
        ModelError: no such model, preset, axis or option, or a value that is not valid.
    """
    from autotuner.ir.models import named_model

    return named_model(reference, extents=given_extents(extent), options=given_options(option), dtype=dtype)


def given_progress(text: str | None, *, as_json: bool) -> "ProgressFormat":
    """Return how progress is shown: as the option says, or else the settings.

    Args:
        as_json: the result is for a program, for which progress is shown only where that is asked for.

    Raises:
        InputError: there is no such format.
    """
    from autotuner.api.telling import progress_format as of_settings

    if text is not None:
        return progress_format(text, "--progress")
    found = of_settings()
    return "none" if as_json and found == "auto" else found


def given_extents(texts: Sequence[str] | None) -> dict[str, int]:
    """Read `--extent l=256`, each time that it was given."""
    extents: dict[str, int] = {}
    for axis, text in _pairs(texts, "--extent", "l=256"):
        if not re.fullmatch("[0-9]{1,18}", text):
            raise ModelError(f"--extent {axis}={text}: write a whole number above 0, below 1e18, e.g. {axis}=256")
        extents[axis] = int(text)
    return extents


def given_options(texts: Sequence[str] | None) -> "dict[str, Scalar]":
    """Read `--option activation=relu`, each time that it was given."""
    from autotuner.ir.models import read_value

    return {name: read_value(text) for name, text in _pairs(texts, "--option", "activation=relu")}


def _pairs(texts: Sequence[str] | None, flag: str, example: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InputError(f"{flag} {text!r}: write name=value, e.g. {flag} {example}")
        if name in dict(found):
            raise InputError(f"{flag} {name} is given twice, as {dict(found)[name]} and {value}: give it once")
        found.append((name, value))
    return found


def check_output(path: Path | None, *given: str | Path | None) -> None:
    """Check that a file can be written, and that it is none of those that the command reads.

    Args:
        path: what is to be written; None for nothing.
        given: what the command was given to read: a path, a model file with its preset, a database.

    Raises:
        InputError: it cannot be written, or it is read.
    """
    if path is None:
        return
    for text in given:
        if text is not None and any(_same(path, file) for file in _files(str(text))):
            raise InputError(f"{path}: this file is given to be read ({text}); name another one to write")
    check_writable(path)


def _files(text: str) -> Iterator[str]:
    """Yield the files that a text may name."""
    yield os.path.expanduser(unquote(text.removeprefix("sqlite:///")) if text.startswith("sqlite:///") else text)
    yield text.rpartition(":")[0]


def _same(path: Path, file: str) -> bool:
    try:
        return bool(file) and (os.path.realpath(path) == os.path.realpath(file) or os.path.samefile(path, file))
    except OSError:
        return False  # one of the two is not there
