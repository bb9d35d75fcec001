"""search_spaces/kernels/*.yaml and the kernels' own rules -> what could compute each part of a graph, and how."""

from autotuner.space.build import build_space
from autotuner.space.cells import Cell, without_params
from autotuner.space.choices import Choice, Conversion, Space
from autotuner.space.conversions import convertible
from autotuner.space.enumeration import plain
from autotuner.space.files import KernelEntry, SpaceFile, describe, load_space, space_file
from autotuner.space.given import given_forms

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
