"""Memory planner: the place of every tensor of a configuration, and the memory of a training step. It runs nothing."""

from autotuner.plan.memory_planner.memory_plan import (
    Geometry,
    MemoryPlan,
    Place,
    PlannedBuffer,
    PlannedStep,
    Port,
    Ports,
    StepMemory,
    memory,
)
from autotuner.plan.memory_planner.planner import make_plan, plan_steps
from autotuner.plan.memory_planner.schedule import Schedule

__all__ = [
    "Geometry",
    "MemoryPlan",
    "Place",
    "PlannedBuffer",
    "PlannedStep",
    "Port",
    "Ports",
    "Schedule",
    "StepMemory",
    "make_plan",
    "memory",
    "plan_steps",
]
