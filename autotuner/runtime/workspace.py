"""Memory of one forward and its backward, and one prebuilt call without arguments per step.

What is handed out lies in storages of its own, in sets: a set is used again once nobody outside holds any of its
storages, so that a gradient which somebody keeps is never overwritten. An output that backward reads is handed out as a
copy. Inputs and given gradients are copied in, which frees the caller to change them and lets them have any strides. A
caller who leaves them as they are until backward is over may have them read where they are: the steps that read them
are built anew for that. From call to call they are followed: those that lie where they lay in the call before are read
there, and the others are copied. Parameters that lie otherwise than the plan says are copied at the start of each
forward; all others are read where the caller keeps them. Where one of those has moved by the time of a call, the
workspace takes all of them as copies from then on.

Where calls are queued, all of it is on the caller's current stream. A workspace that moves to another stream makes that
one wait for all that was queued on the last one, what callers did there with what they were handed among it. Each set's
calls become graphs; see `graphs`. What a caller captures into a graph of its own runs whenever that is replayed, so a
workspace that was used in it is never used again. One that was made in it, or for one step only, gives all of its
memory back once its backward is over: what comes behind that writes there.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from autotuner.plan.memory_planner import MemoryPlan, Place, Ports
from autotuner.runtime.arena import Arena
from autotuner.runtime.arena_memory import ArenaMemory
from autotuner.runtime.built_steps import BuiltSteps
from autotuner.runtime.devices import Run, device_runtime
from autotuner.runtime.graphs import CallSequence, Graphs, StreamOrder, Switch
from autotuner.runtime.offered_memory import bases_in
from autotuner.runtime.output_set import Finish, OutputSet, OutputSets
from autotuner.runtime.parameter_memory import ParameterCopies, ParameterMemory
from autotuner.runtime.scratch import Scratch
from autotuner.runtime.shown_tensors import ShownTensors
from autotuner.runtime.stages import Stages

CPU = torch.device("cpu")


class Workspace:
    """Built once for given parameters; runs many times.

    Attributes:
        plan, ports, device, scratch: as given.
        runtime: of the device.
        arena: memory of what the plan keeps to itself.
        parameters: copies of those that are not read in the caller's memory.
        steps: calls of the steps that touch nothing which is handed out, and the memory that they read.
        outputs: storages of what is handed out, and the calls built on them.
        in_capture: whether a caller's graph writes here whenever it is replayed.
        gives_back: whether it is for one forward and its backward, and gives its memory back then.
        is_gone: whether it has.
        is_broken: whether a call has ended with an error, so that nobody knows what its steps read; nothing runs here
            again.
        skips_kernels: whether parameters are copied and no kernel runs; see `Pool`.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        ports: Ports,
        parameters: ParameterMemory,
        device: torch.device = CPU,
        graphs: Switch | None = None,
        scratch: Scratch | None = None,
        *,
        shares: bool = False,
    ) -> None:
        """Allocate and build.

        Args:
            plan: where everything lies.
            ports: how the caller sees inputs and outputs.
            device: where all of it lies; the parameters' own.
            graphs: whether calls become graphs, where the device has any; None for no.
            scratch: shared with other workspaces, for what one phase makes and reads itself; None for its own. That of
                one step is for workspaces that give their memory back.
            shares: whether the arena may have memory of other workspaces, which are not in use; see `arena_memory`.
        """
        self.plan, self.ports, self.device = plan, ports, device
        self.runtime = device_runtime(device)
        self._graphs: Graphs | None = None
        if self.runtime.has_graphs and graphs is not None:
            self._graphs = Graphs(self.runtime, graphs, None if scratch is None else scratch.of_graphs)
        self._order = StreamOrder()
        self.scratch = scratch
        self.in_capture = self.skips_kernels = self.is_gone = self.is_broken = False
        self._consumed = True
        self._shared: ArenaMemory | None = None
        with torch.inference_mode(False), torch.no_grad(), self._turn():
            self.gives_back = self.in_capture or (scratch is not None and scratch.is_of_one_step)
            self.arena = Arena(plan, device, scratch, self._order if shares and not self.gives_back else None)
            self._shared = self.arena.memory
            self._follow_the_last_use()
            self.parameters = ParameterCopies(self.arena, parameters)
            self._shown = ShownTensors(plan, ports.shown, device)
            read = {plan.parameters[name]: tensor for name, tensor in parameters.views.items()}
            self.steps = BuiltSteps(
                plan, read | self.arena.views() | self.parameters.views(), self._shown, self.runtime.vendor
            )
            self._inputs = Stages(self.arena, ports.inputs, "")
            self._given = Stages(self.arena, ports.given, "grad_")
        self.outputs = OutputSets(self.arena, self.steps, ports, self.runtime)

    def is_taken(self) -> bool:
        """Take the arena's memory in use again, and say whether that is so: not where another workspace has it."""
        return self.arena.is_taken()

    def rest(self) -> None:
        """Leave the arena's memory to other workspaces for now; not where a caller's graph writes there."""
        self.arena.hold = None

    @property
    def state(self) -> Tensor:
        """The bytes that forward leaves for backward."""
        return self.arena.state

    @property
    def has_graphs(self) -> bool:
        """True where its calls have become graphs, which must not be destroyed while something is captured."""
        return any(sequence.graphs for made in self.outputs for sequence in made.sequences)

    def forward(self, *inputs: Tensor | None, current: Sequence[Tensor] = (), in_place: bool = False) -> list[Tensor]:
        """Run forward on inputs, in the order of the ports; None stands for zeros.

        Args:
            inputs: any strides.
            current: the caller's parameters, in the order of `lying`.
            in_place: whether inputs that lie as the plan says are read where they are, in backward too.
        """
        with self._turn():
            self._consumed = False
            if self._follows(in_place):
                self._move(self._inputs.follow(inputs))
            else:
                self._put_back(self._inputs, self._given)
                if in_place:  # what is handed out has to lie where a capture keeps its memory
                    self._forget_outputs()
                self._move(self._inputs.take(inputs, in_place=in_place))
            self._move(self.parameters.follow(current))
            self.parameters.take(current)
            made = self._set("forward")
            self._run(made.sequence, self.parameters.copying)
            handed = [*self.outputs.handed(made, range(len(made.handed))), *self._shown.handed()]
            if self.gives_back:
                self.outputs.drop("forward")
                self.steps.drop(
                    self._inputs.leave([p for name, p in self.plan.inputs.items() if name not in self.plan.read_again])
                )
            return handed

    def backward(
        self,
        given: Sequence[Tensor | None],
        wanted: tuple[bool, ...],
        keeps: bool = False,
        current: Sequence[Tensor] = (),
        in_place: bool = False,
        places: Sequence[Tensor | None] = (),
        finish: Finish | None = None,
        key: Hashable = None,
    ) -> list[Any]:
        """Run the steps that the wanted gradients need, and return them in the order of the ports, None for others.

        Backward writes over what forward saved for it once that is read. With `keeps`, a copy is put back afterwards.

        Args:
            given: gradients of the outputs, then of what is shown; None stands for zeros.
            wanted: which gradients of the ports' sources.
            keeps: whether it may be called again for the same forward.
            current: the caller's parameters, in the order of `lying`, with the values that forward saw.
            in_place: whether gradients of outputs that lie as the plan says are read where they are.
            places: memory for each gradient of the ports' sources, or None. It is written to where the workspace gives
                its own back, and it lies as the plan says.
            finish: makes what is returned of that.
            key: of what `finish` does.

        Raises:
            RuntimeError: an earlier backward has consumed what forward saved, or has ended with an error.
        """
        if self.is_broken:
            raise RuntimeError("an earlier call of this tuned layer has ended with an error; run forward again")
        if self._consumed:
            raise RuntimeError(
                "backward ran already, and has used the memory of what forward saved; run forward again, or keep what "
                "it saved: retain_graph=True, or keeps=True in the earlier backward"
            )
        with self._turn():
            if moved := self.parameters.follow(current):
                self._move(moved)
                self.parameters.take(current)
            saved = self.arena.saved
            copies = [tensor.clone() for tensor in saved] if keeps else None
            try:
                return self._backward(given, wanted, in_place, places, finish, key)
            finally:
                if copies is None:
                    self._consumed = True
                    if self.in_capture or self.gives_back:
                        self.let_go()
                else:
                    for tensor, copy in zip(saved, copies, strict=True):
                        tensor.copy_(copy)

    def _backward(
        self,
        given: Sequence[Tensor | None],
        wanted: tuple[bool, ...],
        in_place: bool,
        places: Sequence[Tensor | None],
        finish: Finish | None,
        key: Hashable,
    ) -> list[Any]:
        count = len(self._given)
        if self._follows(in_place):
            self._move(self._given.follow(given[:count]))
        else:
            self._put_back(self._given)
            self._move(self._given.take(given[:count], in_place=in_place and self.gives_back))
        self._shown.take(given[count:])
        offered = bases_in(self.plan, self.ports, places) if self.gives_back else {}
        made = self.outputs.over("backward", offered) if offered else self._set("backward")
        self._run(made.sequence_for(wanted))
        if finish is not None:
            return self.outputs.finished(made, (wanted, key), wanted, finish)
        handed = iter(self.outputs.handed(made, [number for number, want in enumerate(wanted) if want]))
        return [next(handed) if want else None for want in wanted]

    def meet(self, inputs: Sequence[Tensor]) -> None:
        """Have backward find inputs that were followed where they are now, or copies of them.

        Args:
            inputs: those of the forward that backward reads.
        """
        if self.gives_back or (self._inputs.are_met(inputs) and not self.runtime.is_capturing()):
            return
        with self._turn():
            self._move(self._inputs.meet(inputs, stays=not self.in_capture))

    def restore(self, state: Tensor, inputs: Sequence[Tensor], current: Sequence[Tensor]) -> None:
        """Take up what a forward elsewhere left for backward, which runs here then.

        Args:
            state: its `state`, on any device.
            inputs: those of the forward that backward reads, where they may have been read in place; none otherwise.
            current: the caller's parameters, in the order of `lying`, with the values that forward saw.
        """
        with self._turn():
            self._consumed = False
            self._put_back(self._inputs, self._given)
            self.state.copy_(state)
            if inputs:
                self._move(self._inputs.take(inputs, in_place=False, names=self.plan.read_again))
            self._move(self.parameters.follow(current))
            self.parameters.take(current)
            for copy in self.parameters.copying:
                copy()

    def tidy(self) -> None:
        """Drop what a capture has outlived, once nothing is captured."""
        if self.outputs.outlived:
            with self.runtime.guard():
                if not self.runtime.is_capturing():
                    self.outputs.outlived = []

    def let_go(self) -> None:
        """Give up all memory that no graph of a caller's writes to; nothing runs here again.

        What was allocated before the capture stays, for as long as the workspace: replays write there.
        """
        if self.is_gone:
            return
        if self.gives_back:
            self.is_gone = True
            del self.arena, self.parameters, self.steps, self.outputs, self._shown, self._inputs, self._given
            return
        places = self._inputs.in_place | self._given.in_place
        if places:
            self.steps.drop(places)
            self._inputs.in_place, self._given.in_place = set(), set()
            self._forget_outputs()

    def stages(self) -> list[Tensor]:
        """Return the memory that inputs and gradients of the outputs are copied to."""
        return [*self._inputs.tensors(), *self._given.tensors()]

    def calls(self, phase: str) -> Mapping[int, Run]:
        """Return a call for each step of a phase, by number; none of them gets what is handed in or out."""
        return self._set(phase).calls

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the device current, and everything in order with what ran here on another stream."""
        try:
            with self.runtime.guard():
                if self.runtime.is_capturing():
                    # Whoever captures has waited for all that was queued before, and nothing may be waited for now.
                    self.in_capture = True
                    yield
                    return
                with nullcontext() if self.scratch is None else self.scratch.turn(self.runtime):
                    self._follow_the_last_use()
                    self._order.turn(self.runtime, self._memory())
                    yield
        except BaseException:
            self.is_broken = True
            raise

    def _follow_the_last_use(self) -> None:
        """Have all that is queued from now on wait for whoever had the arena's memory in use before."""
        if self._shared is not None and self._shared.order is not None:
            self._shared.order.turn(self.runtime, (self._shared.tensor,))

    def _memory(self) -> Iterator[Tensor]:
        """Yield a tensor of each storage that was allocated here."""
        yield from self.arena.parts()
        yield from self.parameters.bases.values()
        yield from self._shown.memory()
        yield from self._inputs.memory()
        for made in self.outputs:
            yield from made.handed

    def _follows(self, in_place: bool) -> bool:
        """Say whether what may be read in place is followed from call to call, and not read there once."""
        return in_place and not self.gives_back and not self.in_capture

    def _put_back(self, *stages: Stages) -> None:
        """Have the steps read these stages in the workspace's own memory again."""
        for stage in stages:
            self._move(stage.put_back())

    def _move(self, views: Mapping[Place, Tensor]) -> None:
        """Have the steps read these places elsewhere, if there are any, and build the calls on outputs anew."""
        if views:
            phases = self.steps.move(views)
            if self.gives_back or self.in_capture:
                self._forget_outputs()
            else:
                self.outputs.renew(phases)

    def _forget_outputs(self) -> None:
        self.outputs.forget(in_capture=self.runtime.is_capturing())

    def _set(self, phase: str) -> OutputSet:
        """Return storages of a phase's outputs that nobody outside holds."""
        return self.outputs.take(phase, self.parameters.copying if phase == "forward" else ())

    def _run(self, sequence: CallSequence, copying: Sequence[Run] = ()) -> None:
        if self.skips_kernels:
            for copy in copying:
                copy()
        elif self._graphs is None:
            sequence.run()
        else:
            self._graphs.run(sequence)
