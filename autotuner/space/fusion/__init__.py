"""Fusion: finds where the patterns that kernels declare occur in a graph.

A cover is convex: no path leaves it and comes back, so that it can run as one kernel.
"""

from autotuner.space.fusion.cover import Cover, Reach, boundary
from autotuner.space.fusion.covers import covers
from autotuner.space.fusion.stacks import stack_families, stack_groups

__all__ = ["Cover", "Reach", "boundary", "covers", "stack_families", "stack_groups"]
