"""Packages that only some uses need: the extra that installs each, and the sentence where it is missing."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from autotuner.errors import MissingError

EXTRAS = {
    "alembic": "tune",
    "cupy": "cuda",
    "fastapi": "server",
    "fastapi_offline": "server",
    "httpx2": "client",
    "jinja2": "cli",
    "matplotlib": "plot",
    "optuna": "tune",
    "prometheus_client": "server",
    "psycopg": "postgresql",
    "ray": "fleet",
    "rich": "cli",
    "scipy": "tune",
    "sqlalchemy": "tune",
    "starlette": "server",
    "tenacity": "client",
    "torch": "torch",
    "typer": "cli",
    "uvicorn": "server",
}
"""Extras by package; of several that install it, the one with the fewest others."""


@contextmanager
def needed_for(use: str) -> Iterator[None]:
    """Say which extra to install where an import in the block lacks a package.

    Args:
        use: what the import is for, as the beginning of a sentence.

    Raises:
        MissingError: a package of an extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = missing_of(use, error)
        if missing is None:
            raise
        raise missing from None


def require(use: str, package: str) -> None:
    """Check that a package is installed, without importing it.

    Raises:
        MissingError: it is not.
    """
    with needed_for(use):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(name=package)


def missing_of(use: str, error: ImportError) -> MissingError | None:
    """Return what to say of a failed import; None where no extra has the package."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return MissingError(f'{use} needs {package}, which is not installed: install "autotuner[{EXTRAS[package]}]"')
