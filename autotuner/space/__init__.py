"""Search space of a graph: what could compute each part of it, from search space files and the kernels' rules."""

from autotuner.space.build import build_space, given_forms
from autotuner.space.choices import Cell, Choice, Conversion, Space, without_params
from autotuner.space.conversions import convertible
from autotuner.space.enumeration import plain
from autotuner.space.files import KernelEntry, SpaceFile, describe, load_space, space_file

__all__ = [
    "Cell",
    "Choice",
    "Conversion",
    "KernelEntry",
    "Space",
    "SpaceFile",
    "build_space",
    "convertible",
    "describe",
    "given_forms",
    "load_space",
    "plain",
    "space_file",
    "without_params",
]
