"""Where every tensor of a configuration lies, and the memory of a training step. Pure: nothing here runs."""

from autotuner.plan.placement.memory import Moment, StepMemory, memory
from autotuner.plan.placement.packing import Block, needed_bytes, pack
from autotuner.plan.placement.plan import Buffer, Place, Plan, PlannedStep
from autotuner.plan.placement.planning import make_plan, plan_steps
from autotuner.plan.placement.port import Geometry, Port, Ports

__all__ = [
    "Block",
    "Buffer",
    "Geometry",
    "Moment",
    "Place",
    "Plan",
    "PlannedStep",
    "Port",
    "Ports",
    "StepMemory",
    "make_plan",
    "memory",
    "needed_bytes",
    "pack",
    "plan_steps",
]
