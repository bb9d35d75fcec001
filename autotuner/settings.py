"""Settings of a user, read once from the environment, and options of one tuning job.

No other module reads an environment variable.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast, get_args
from urllib.parse import quote, urlsplit

from autotuner.errors import InputError, SettingsError

DEFAULT_DATABASE = "sqlite:///autotuner.sqlite"
DEFAULT_TIMEOUT_S = 30.0
DEFAULT_CACHE = "~/.cache/autotuner"
DEFAULT_SERVER = "http://127.0.0.1:8000"
DEFAULT_HOST = "127.0.0.1"
LogFormat = Literal["auto", "words", "json"]
ProgressFormat = Literal["auto", "rich", "lines", "json", "none"]
DATABASE_KINDS = ("sqlite", "postgresql")


def package_version() -> str:
    """Return this package's version; "unknown" where a checkout is on the path and nothing is installed."""
    try:
        return version("autotuner")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a user for every job; `TuneOptions` are those of one job.

    Args:
        database_url: `AUTOTUNER_DATABASE`, a URL or the path of an SQLite file.
        threads: `AUTOTUNER_THREADS`, threads that a measured kernel may use; None for all cores.
        timeout_s: `AUTOTUNER_TIMEOUT_S`, after which a candidate is given up.
        cache_dir: `AUTOTUNER_CACHE`, where compiled kernels are kept; made by whoever first writes to it.
        server_url: `AUTOTUNER_SERVER`, the service that clients ask.
        host: `AUTOTUNER_HOST`, the address that a service listens at.
        allowed_hosts: `AUTOTUNER_ALLOWED_HOSTS`, names that clients may ask it under, separated by commas.
        quiet: `AUTOTUNER_QUIET`, whether nothing is printed while a process tunes or compiles.
        progress: `AUTOTUNER_PROGRESS`, how a tuning shows its progress on standard error: as a display that changes in
            place (rich, also where that is no terminal), as lines, as JSON lines, not at all (none), or as suits the
            terminal (auto).
        log_format: `AUTOTUNER_LOG_FORMAT`, of services and workers: words, json, or auto for words at a terminal.
    """

    database_url: str = DEFAULT_DATABASE
    threads: int | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    cache_dir: Path = Path(os.path.expanduser(DEFAULT_CACHE))
    server_url: str = DEFAULT_SERVER
    host: str = DEFAULT_HOST
    allowed_hosts: tuple[str, ...] = ()
    log_format: LogFormat = "auto"
    quiet: bool = False
    progress: ProgressFormat = "auto"

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> "Settings":
        """Read the settings from environment variables; one that is empty counts as not set.

        Args:
            env: what to read instead of the process's own environment.

        Raises:
            SettingsError: a variable has a value that cannot be used.
        """
        given = {name: text.strip() for name, text in (os.environ if env is None else env).items() if text.strip()}
        return cls(
            database_url=_database(given.get("AUTOTUNER_DATABASE", DEFAULT_DATABASE)),
            threads=_threads(given["AUTOTUNER_THREADS"]) if "AUTOTUNER_THREADS" in given else None,
            timeout_s=_timeout_s(given.get("AUTOTUNER_TIMEOUT_S", str(DEFAULT_TIMEOUT_S))),
            cache_dir=_cache_dir(given.get("AUTOTUNER_CACHE", DEFAULT_CACHE)),
            server_url=_server(given.get("AUTOTUNER_SERVER", DEFAULT_SERVER)),
            host=given.get("AUTOTUNER_HOST", DEFAULT_HOST),
            allowed_hosts=tuple(given.get("AUTOTUNER_ALLOWED_HOSTS", "").replace(",", " ").split()),
            log_format=_log_format(given.get("AUTOTUNER_LOG_FORMAT", "auto")),
            quiet=_switch(given.get("AUTOTUNER_QUIET", "0"), "AUTOTUNER_QUIET"),
            progress=_progress(given.get("AUTOTUNER_PROGRESS", "auto")),
        )


@dataclass(frozen=True)
class Limits:
    """Limits of a tuning; at the first that it reaches, it answers with the best plan so far.

    Args:
        seconds: until the plan is solved for, from when the job is begun, by everyone who takes it up; in a call that
            is given example inputs or batches, from its beginning: reading the model counts, and its regions share what
            is left. None for no limit.
        measurements: that are new, of each job or region; None for no limit.
    """

    seconds: float | None = None
    measurements: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not (isfinite(self.seconds) and self.seconds > 0):
            raise InputError(f"the limit of seconds is {self.seconds}: give a number above 0, or none")
        if self.measurements is not None and self.measurements < 1:
            raise InputError(f"the limit of measurements is {self.measurements}: give a number above 0, or none")


@dataclass(frozen=True)
class TuneOptions:
    """Options of one tuning job: when it stops, what it measures anew, and how much memory its plan may need.

    Args:
        gap: stop measuring as soon as the best plan so far is proven to take at most this share longer than the best
            there can be: 0.1 for a tenth.
        estimated_gap: the same by learned costs of what is not measured: an expectation, no proof; reached earlier.
        budget_bytes: the most memory that a training step may need beside parameters and inputs; None for no limit.
        exhaustive: measure everything, also what is proven or expected to make no difference.
        limits: of time and measurements; what they leave out is measured by a later job.
        again: solve anew even if the answer is known; measurements are reused all the same.
        retry: measure once more what has failed.
        remeasure: measure everything anew, whatever is known; what cannot be measured keeps what was known.
        end_to_end: time the answer against the framework, and keep that in the configuration; a model for which the
            framework has no layer is not timed.
        numerics: what forward may save for backward: "exact", values as it computed them; "8-bit", to keep to a budget
            also activations as 8-bit integers with a scale for each 128 of them. Or what products with weights may be
            computed from: "fp8", also 8-bit floats, with a scale for each row.
    """

    gap: float | None = None
    estimated_gap: float | None = None
    budget_bytes: int | None = None
    exhaustive: bool = False
    limits: Limits = Limits()
    again: bool = False
    retry: bool = False
    remeasure: bool = False
    end_to_end: bool = True
    numerics: str = "exact"

    def __post_init__(self) -> None:
        for name, share in (("gap", self.gap), ("estimated_gap", self.estimated_gap)):
            if share is not None and not (isfinite(share) and share >= 0):
                raise InputError(f"{name} is {share}: give a share of 0 or more, such as 0.05, or none")
        if self.budget_bytes is not None and not isinstance(self.budget_bytes, int):
            raise InputError(f"the budget is {self.budget_bytes!r}: give a number of bytes, such as 2**30, or none")
        if self.budget_bytes is not None and self.budget_bytes < 1:
            raise InputError(f"the budget is {self.budget_bytes} bytes: give a number above 0, or none")

    @classmethod
    def of(cls, **given: "Unpack[TuneKeywords]") -> "TuneOptions":
        """Return the options that are given by keyword; `limits=None` stands for no limits.

        Raises:
            TypeError: there is no such option.
        """
        chosen: dict[str, Any] = {name: value for name, value in given.items() if (name, value) != ("limits", None)}
        for name in chosen:
            if name not in cls.names():
                is_limit = name in (field.name for field in fields(Limits))
                instead = (
                    f"write limits=autotuner.Limits({name}=...)" if is_limit else f"it has {', '.join(cls.names())}"
                )
                raise TypeError(f"a tuning has no option {name!r}: {instead}")
        return cls(**chosen)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the options."""
        return tuple(field.name for field in fields(cls))

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        return value if self.numerics != "exact" else {name: value[name] for name in value if name != "numerics"}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "TuneOptions":
        """Read what `to_json` wrote."""
        return cls(**{**value, "limits": Limits(**value["limits"])})


class TuneKeywords(TypedDict, total=False):
    """The fields of `TuneOptions` as keyword arguments, for type checkers."""

    gap: float | None
    estimated_gap: float | None
    budget_bytes: int | None
    exhaustive: bool
    limits: Limits | None
    again: bool
    retry: bool
    remeasure: bool
    end_to_end: bool
    numerics: str


def parsed_bytes(given: int | str | None, name: str) -> int | None:
    """Return bytes that are given as a number or as a text, with KiB, MiB or GiB for powers of 1024, KB, MB or GB for
    powers of 1000; None for None.

    Raises:
        InputError: it is something else.

    >>> parsed_bytes("512MiB", "--budget"), parsed_bytes("1.5 GB", "--budget")
    (536870912, 1500000000)
    """
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 0):
        return given
    match = None
    if isinstance(given, str):
        match = re.fullmatch(
            r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,18})(?:\.[0-9]+)?)\s*([KMGT]i?)?B?", given.strip(), re.IGNORECASE
        )
    if match is None:
        raise InputError(f"{name} {given!r}: write a number of bytes, or one with a unit, such as 512MiB")
    number, unit = match[1].replace(",", ""), (match[2] or "").lower()
    return int(float(number) * (1024 if unit.endswith("i") else 1000) ** " kmgt".index(unit[:1] or " "))


def client_token(env: Mapping[str, str] | None = None) -> str | None:
    """Return the token that a client sends: `AUTOTUNER_TOKEN`, or the content of the file `AUTOTUNER_TOKEN_FILE`.

    It is no field of `Settings`, so that whoever prints those prints no token.

    Raises:
        SettingsError: the file cannot be read, or what is given is no token; the message has none of it.
    """
    given = os.environ if env is None else env
    text, path = given.get("AUTOTUNER_TOKEN", "").strip(), given.get("AUTOTUNER_TOKEN_FILE", "").strip()
    name = "AUTOTUNER_TOKEN"
    if not text and path:
        name = f"AUTOTUNER_TOKEN_FILE ({path})"
        try:
            text = Path(os.path.expanduser(path)).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no ASCII text"
            raise SettingsError(f"{name} cannot be read: {why}") from None
    elif not text:
        return None
    return checked_token(text, name)


def checked_token(text: str, name: str) -> str:
    """Return a token that can be sent.

    Raises:
        SettingsError: it cannot; the message names where it is from, and has none of it.
    """
    if not text or len(text) > 200 or not all("!" <= char <= "~" for char in text):
        raise SettingsError(f"{name} holds no token: give one as `autotuner token create` prints it")
    return text


def progress_format(text: str, name: str) -> ProgressFormat:
    """Return how progress is shown.

    Args:
        name: of the variable or option that gives it.

    Raises:
        InputError: there is no such format.
    """
    if text in get_args(ProgressFormat):
        return cast(ProgressFormat, text)
    raise InputError(f"{name} is {text!r}: write auto, rich, lines, json or none")


def is_dumb_terminal() -> bool:
    """Say whether a terminal only prints: `TERM` says that it moves no cursor."""
    return os.environ.get("TERM", "").strip().lower() in ("dumb", "unknown")


def runtime_dir() -> Path | None:
    """Return the folder that `XDG_RUNTIME_DIR` names for what a user's processes share, if it does."""
    text = os.environ.get("XDG_RUNTIME_DIR", "").strip()
    return Path(text) if text.startswith("/") else None


def cxx_compiler() -> str:
    """Return the C++ compiler that kernels are compiled with: `CXX`, as torch reads it, or g++."""
    return os.environ.get("CXX", "").strip() or "g++"


def database_url(url_or_path: str | Path) -> str:
    """Return a database URL as it is, and the path of an SQLite file as a URL."""
    if isinstance(url_or_path, str) and "://" in url_or_path:
        return url_or_path
    return "sqlite:///" + quote(os.path.expanduser(url_or_path), safe="/")


def server_url(text: str) -> str:
    """Return the URL of a service, without a slash at its end.

    Raises:
        InputError: it is no URL of a service.
    """
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or any(char.isspace() for char in text):
        shown = text if "@" not in text else f"...@{text.rpartition('@')[2]}"
        raise InputError(f"{shown!r} is no URL of a service: write http://HOST:PORT, such as {DEFAULT_SERVER}")
    return text.rstrip("/")


def _database(text: str) -> str:
    kind = text.split("://")[0].split("+")[0]
    if "://" in text and kind not in DATABASE_KINDS:
        raise SettingsError(
            f"AUTOTUNER_DATABASE names a {kind!r} database: write the path of an SQLite file, sqlite:///FILE or "
            "postgresql+psycopg://USER@HOST/NAME"
        )
    return database_url(text)


def _log_format(text: str) -> LogFormat:
    if text in get_args(LogFormat):
        return cast(LogFormat, text)
    raise SettingsError(f"AUTOTUNER_LOG_FORMAT is {text!r}: write auto, words or json")


def _progress(text: str) -> ProgressFormat:
    try:
        return progress_format(text, "AUTOTUNER_PROGRESS")
    except InputError as error:
        raise SettingsError(str(error)) from None


def _switch(text: str, name: str) -> bool:
    if text not in ("0", "1"):
        raise SettingsError(f"{name} is {text!r}: write 1 for yes, or 0 or nothing for no")
    return text == "1"


def _threads(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise SettingsError(
            f"AUTOTUNER_THREADS is {text!r}: write a whole number from 1, or leave it unset for all cores"
        )
    return int(text)


def _timeout_s(text: str) -> float:
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not (isfinite(timeout_s) and timeout_s > 0):
        raise SettingsError(f"AUTOTUNER_TIMEOUT_S is {text!r}: write a number of seconds above 0, such as 30 or 0.5")
    return timeout_s


def _server(text: str) -> str:
    try:
        return server_url(text)
    except InputError as error:
        raise SettingsError(f"AUTOTUNER_SERVER: {error}") from error


def _cache_dir(text: str) -> Path:
    path = Path(os.path.expanduser(text))
    if path.exists() and not path.is_dir():
        raise SettingsError(f"AUTOTUNER_CACHE is {text!r}, which is a file: write a directory, or one that can be made")
    return path
