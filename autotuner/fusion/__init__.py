"""Which operators one kernel may cover: single ones, library patterns, stacks of siblings, and connected sets.

A cover is convex: no path leaves it and comes back, so that it can run as one kernel.
"""

from autotuner.fusion.cover import Cover, Reach, boundary
from autotuner.fusion.covers import covers
from autotuner.fusion.stacks import stack_families, stack_groups

__all__ = ["Cover", "Reach", "boundary", "covers", "stack_families", "stack_groups"]
