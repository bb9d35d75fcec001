"""Token of a cluster: where this host has it, what is wrong with it, and the drawing of a new one.

Ray reads it from RAY_AUTH_TOKEN, or else from the file that RAY_AUTH_TOKEN_PATH names, or else from ~/.ray/auth_token.
Without one its processes abort with a stack of C++, so all is looked at before Ray is asked.
"""

import os
import secrets
import stat
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from autotuner.errors import ClusterTokenError, stacklevel

MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
DRAWN_BYTES = 32
OPEN = (
    f"{MODE}={{mode}}: authentication is off, so whoever reaches the cluster's ports can run code on all of its hosts; "
    f"unset {MODE}, or set it to token"
)
COPY = (
    "copy the head's token, as `ray get-auth-token` prints it there, into {path} here with mode 0600, or name its file "
    f"in {PATH}"
)


def is_on(environment: Mapping[str, str]) -> bool:
    """Say whether hosts of a cluster prove by a token who they are; it is so unless the environment says otherwise."""
    return environment.get(MODE, "token").lower() == "token"


def token_file(environment: Mapping[str, str]) -> Path:
    """Return the file that holds the token where RAY_AUTH_TOKEN does not.

    Raises:
        ClusterTokenError: neither RAY_AUTH_TOKEN_PATH nor HOME is set.
    """
    named, home = environment.get(PATH), environment.get("HOME")
    if not named and not home:
        raise ClusterTokenError(
            f"none of {TOKEN}, {PATH} and HOME is set: name the file of the cluster's token in {PATH}"
        )
    return Path(named) if named else Path(str(home)) / ".ray" / "auth_token"


def has_token(environment: Mapping[str, str]) -> bool:
    """Say whether this host has a token; a file of the user's own that others can read is made private, with a warning.

    Raises:
        ClusterTokenError: there is one, and it cannot be used.
    """
    if environment.get(TOKEN):
        if not environment[TOKEN].strip():
            raise ClusterTokenError(f"{TOKEN} is blank: unset it, or set it to the head's token")
        return True
    path = token_file(environment)
    try:
        text = path.read_text(encoding="utf-8").strip()
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ClusterTokenError(f"the token in {path} cannot be read ({why}): {COPY.format(path=path)}") from error
    if not text:
        raise ClusterTokenError(f"the token file {path} is empty: {COPY.format(path=path)}")
    if mode & stat.S_IRWXO:
        _make_private(path, mode)
    return True


def require_token(environment: Mapping[str, str], address: str) -> None:
    """Check that this host has a token for the cluster at an address; warn where authentication is off.

    Raises:
        ClusterTokenError: it has none, or one that cannot be used.
    """
    if not is_on(environment):
        warnings.warn(OPEN.format(mode=environment[MODE]), stacklevel=stacklevel())
    elif not has_token(environment):
        path = token_file(environment)
        raise ClusterTokenError(f"no token for the cluster at {address}: there is no {path}; {COPY.format(path=path)}")


def draw_token(environment: Mapping[str, str], *, dry: bool = False) -> Path | None:
    """Draw a token into its file, mode 0600, where this host has none; warn where authentication is off.

    Args:
        dry: draw none, and only check that one could be.

    Returns:
        The file, where one was drawn; with `dry`, the one that would be.

    Raises:
        ClusterTokenError: the token that is there cannot be used, or none can be written.
    """
    if not is_on(environment):
        warnings.warn(OPEN.format(mode=environment[MODE]), stacklevel=stacklevel())
        return None
    if has_token(environment):
        return None
    path = token_file(environment)
    if dry:
        there = next(parent for parent in path.parents if parent.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ClusterTokenError(_unwritable(path, f"{there} is not writable"))
        return path
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")  # mode 0600
        try:
            with open(number, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(DRAWN_BYTES))
            os.link(part, path)  # of two heads that start at once, the second one takes the first one's
        finally:
            os.unlink(part)
    except FileExistsError:
        return None if has_token(environment) else path
    except OSError as error:
        raise ClusterTokenError(_unwritable(path, error.strerror or str(error))) from error
    return path


def refused(environment: Mapping[str, str], address: str) -> ClusterTokenError:
    """Return the error of a head that does not take this host's token."""
    if not is_on(environment):
        return ClusterTokenError(
            f"the head at {address} asks for a token, and {MODE}={environment[MODE]} here: unset it"
        )
    if environment.get(TOKEN):
        return ClusterTokenError(f"the head at {address} does not let this host in: {TOKEN} is not the head's token")
    path = token_file(environment)
    return ClusterTokenError(
        f"the head at {address} does not let this host in: the token in {path} is not the head's; "
        f"{COPY.format(path=path)}"
    )


def _make_private(path: Path, mode: int) -> None:
    """Make a token file private to its owner.

    Raises:
        ClusterTokenError: it is another's.
    """
    words = f"the token file {path} was readable for every user of this host, mode {stat.S_IMODE(mode):04o}"
    try:
        path.chmod(0o600)
    except OSError as error:
        raise ClusterTokenError(
            f"{words.replace('was', 'is', 1)}, and whoever reads it can run code on the cluster: give it mode 0600 "
            f"({error.strerror})"
        ) from error
    warnings.warn(f"{words}; it is 0600 now", stacklevel=stacklevel())


def _unwritable(path: Path, why: str) -> str:
    return f"no token is there, and none can be drawn into {path} ({why}): name a file in {PATH}, or set {TOKEN}"
