"""Versions of installed packages, as facts of an environment."""

import importlib.metadata


def version(package: str) -> str:
    """Return the version of a package, "absent" where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
