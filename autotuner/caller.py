"""The caller: the user's code, which a warning is about."""

import sys

OWN = ("autotuner", "torch", "contextlib", "functools")
"""Packages and modules that stand between the user's code and a warning."""


def stacklevel() -> int:
    """Return the `stacklevel` with which a warning points at the first frame outside this package and torch.

    Call it in the call of `warnings.warn` itself: `warnings.warn(message, stacklevel=stacklevel())`. Where every frame
    is inside, the outermost one is pointed at. (From Python 3.12 on, `skip_file_prefixes` does the same.)
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_own(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
        code = frame.f_code.co_filename
        level += not ("importlib" in code and "_bootstrap" in code)  # warnings count no frames of the import system
    return level


def _is_own(module: str) -> bool:
    return module.partition(".")[0] in OWN
