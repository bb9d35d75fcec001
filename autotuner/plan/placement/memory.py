"""What a training step allocates beside parameters and inputs, predicted from its plan."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autotuner.plan.placement.plan import Plan

ZERO: Mapping[str, int] = {}


@dataclass(frozen=True)
class Moment:
    """A step, or what is handed in before forward and before backward.

    Args:
        makes: names of the tensors that it makes, or that are handed in.
        live_bytes: tensors that it needs or makes, that a later step needs, or that have been handed out.
        workspace_bytes: what its kernel allocates at most while it runs.
    """

    makes: tuple[str, ...]
    live_bytes: int
    workspace_bytes: int


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a training step beside its parameters and inputs.

    Args:
        held_bytes: what forward leaves for backward, staged copies of inputs among it.
        arena_bytes: one allocation for all that nobody sees from outside, for as long as the layer's module lives.
        outputs_bytes: what is handed out, output and gradients. It stays allocated for the next step.
        workspace_bytes: the most that one kernel allocates while it runs.
        moments: what is live at each step, in running order.
    """

    held_bytes: int
    arena_bytes: int
    outputs_bytes: int
    workspace_bytes: int
    moments: tuple[Moment, ...]

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated at any time of a second step, when nothing of the first is held any more."""
        return self.arena_bytes + self.outputs_bytes + self.workspace_bytes

    @property
    def live_peak_bytes(self) -> int:
        """The most that is live at any time: what the peak would be if every byte were allocated when it is needed."""
        return max(moment.live_bytes + moment.workspace_bytes for moment in self.moments)


def memory(plan: Plan, workspaces: Mapping[str, int] = ZERO) -> StepMemory:
    """Predict what the runtime allocates for a plan.

    An output that backward reads is handed out as a copy, so it counts twice. What a kernel keeps from step to step
    (vectors of ones) counts as its workspace.

    Args:
        plan: where everything lies.
        workspaces: bytes that a call allocates at most while it runs, by its key; a call that is missing has 0.
    """
    outputs = [buffer for buffer in plan.buffers if buffer.role == "output"]
    read = [buffer for buffer in outputs if buffer.phase == "forward" and buffer.last > plan.boundary]
    copied = [buffer for buffer in outputs if buffer.phase == "forward"] if plan.handed_out_and_read else []
    return StepMemory(
        held_bytes=sum(plan.buffers[i].size_bytes for i in plan.saved) + sum(buffer.size_bytes for buffer in read),
        arena_bytes=plan.arena_bytes,
        outputs_bytes=sum(buffer.size_bytes for buffer in (*outputs, *copied)),
        workspace_bytes=max((workspaces.get(step.call.key, 0) for step in plan.steps), default=0),
        moments=tuple(_moments(plan, workspaces)),
    )


def _moments(plan: Plan, workspaces: Mapping[str, int]) -> Iterator[Moment]:
    yield Moment(tuple(plan.inputs), _live_bytes(plan, 0), 0)
    for number, step in enumerate(plan.steps):
        if number == plan.forward:
            yield Moment(tuple(plan.given), _live_bytes(plan, plan.boundary), 0)
        makes = tuple(place[0] for place in step.outputs if place is not None)
        yield Moment(makes, _live_bytes(plan, plan.tick(number)), workspaces.get(step.call.key, 0))


def _live_bytes(plan: Plan, tick: int) -> int:
    """Return the bytes of tensors that are needed at a tick, and of those that have been handed out by then."""
    return sum(
        buffer.size_bytes
        for buffer in plan.buffers
        if buffer.role != "parameter" and buffer.first <= tick and (tick <= buffer.last or buffer.role == "output")
    )
