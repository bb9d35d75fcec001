"""Processes that train one model together."""

from torch import distributed


def are_several() -> bool:
    """Say whether this process trains one model with others, as torch's process group says."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
