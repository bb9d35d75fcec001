"""Memory of one forward and its backward, and one prebuilt call without arguments per step.

What is handed out lies in storages of its own, in sets: a set is used again once nobody outside holds any of its
storages, so that a gradient which somebody keeps is never overwritten. An output that backward reads is handed out as a
copy. Inputs and given gradients are copied in, which frees the caller to change them and lets them have any strides. A
caller who leaves them as they are until backward is over may have them read where they are: the steps that read them
are built anew for that. Parameters that lie otherwise than the plan says are copied at the start of each forward; all
others are read where the caller keeps them. Where one of those has moved by the time of a call, the workspace takes all
of them as copies from then on.

On CUDA all of it is queued on the caller's current stream. A workspace that moves to another stream makes that one
wait for all that was queued on the last one, what callers did there with what they were handed among it. Each set's
calls become CUDA graphs; see `cuda`. What a caller captures into a graph of its own runs whenever that is replayed,
so a workspace that was used in it is never used again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager

import torch
from torch import Tensor

from autotuner.ir.device import has_graphs
from autotuner.kernels import KERNELS
from autotuner.plan.memory_planner import MemoryPlan, Place, Ports
from autotuner.runtime.cuda import CallSequence, Cuda, Graphs, Run, StreamOrder, Switch
from autotuner.runtime.output_set import OutputSet, copy_of
from autotuner.runtime.parameter_memory import ParameterCopies, ParameterMemory
from autotuner.runtime.scratch import Scratch
from autotuner.runtime.shown_tensors import ShownTensors
from autotuner.runtime.stages import Stages
from autotuner.runtime.state_memory import StateMemory

# Two sets let one be held (by `.grad`, by last step's output) while the other is written, step after step. Where more
# are held, results are handed out as copies.
SETS = 2

CPU = torch.device("cpu")


class Workspace:
    """Built once for given parameters; runs many times.

    Attributes:
        plan, ports, device: as given.
        cuda: the device, where it is one of CUDA.
        views: memory of each place of the plan, but for what is handed out of sets.
        held: buffers that are handed out as copies, since backward reads them.
        inside: calls of the steps that touch nothing which is handed out.
        parameters: copies of those that are not read in the caller's memory.
        scratch: as given.
        state: the bytes that forward leaves for backward, as one tensor.
        in_capture: whether a caller's graph writes here whenever it is replayed.
        copies: how often results were handed out as copies, because all sets were held.
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
    ) -> None:
        """Allocate and build.

        Args:
            plan: where everything lies.
            ports: how the caller sees inputs and outputs.
            device: where all of it lies; the parameters' own.
            graphs: whether calls become CUDA graphs; None for no. On the CPU there are none.
            scratch: shared with other workspaces, for what one phase makes and reads itself; None for its own.
        """
        self.plan, self.ports, self.device = plan, ports, device
        self.cuda = Cuda(device) if has_graphs(device.type) else None
        self._graphs = Graphs(self.cuda, graphs) if self.cuda is not None and graphs is not None else None
        self._order = StreamOrder()
        self.scratch = scratch
        self.in_capture = False
        with torch.inference_mode(False), torch.no_grad(), self._turn():
            own_bytes = plan.arena_bytes if scratch is None else plan.kept_bytes
            state = StateMemory.of(plan, device.type)
            memory = torch.empty(max(state.held_bytes + own_bytes, 1), dtype=torch.uint8, device=device)
            self.state, self._arena = memory[: state.size_bytes], memory[state.held_bytes :]
            self._beyond = None if scratch is None else scratch.memory(plan.arena_bytes - own_bytes, device)
            self.views = {plan.parameters[name]: tensor for name, tensor in parameters.views.items()}
            for number, buffer in enumerate(plan.buffers):
                if buffer.role == "arena":
                    self.show(number, self._memory(number), self.views)
            self.held = {number: self._part(memory, start, number) for number, start in state.held.items()}
            for number, base in self.held.items():
                self.show(number, base, self.views)
            self._shown = ShownTensors(plan, ports.shown, device)
            self._lying = parameters.lying
            self.parameters = self._copied(parameters.apart, parameters.current, moving=parameters.moving)
            self.inside = self._built_inside()
            self._saved = [self._arena[plan.buffers[i].start_bytes :][: plan.buffers[i].size_bytes] for i in plan.saved]
            self._inputs = Stages(plan, ports.inputs, "", self.views, device)
            self._given = Stages(plan, ports.given, "grad_", self.views, device)
        self._sets: dict[str, list[OutputSet]] = {"forward": [], "backward": []}
        self._spare: dict[str, OutputSet] = {}
        self._in_place: set[Place] = set()
        self._outlived: list[OutputSet] = []  # forgotten in a capture, which is no time to destroy their graphs
        self.copies = 0
        self._consumed = True
        self.skips_kernels = False

    @property
    def copying(self) -> list[Run]:
        """Calls that copy parameters, at the start of each forward."""
        return self.parameters.copying

    @property
    def has_graphs(self) -> bool:
        """True where its calls have become CUDA graphs, which must not be destroyed while something is captured."""
        sets = (*self._sets["forward"], *self._sets["backward"], *self._spare.values())
        return any(sequence.graphs for made in sets for sequence in made.sequences)

    def forward(self, *inputs: Tensor | None, current: Sequence[Tensor] = (), in_place: bool = False) -> list[Tensor]:
        """Run forward on inputs, in the order of the ports; None stands for zeros.

        Args:
            inputs: any strides.
            current: the caller's parameters, in the order of `lying`.
            in_place: whether inputs that lie as the plan says are read where they are, in backward too.
        """
        with self._turn():
            return self._forward(inputs, current, in_place)

    def _forward(self, inputs: Sequence[Tensor | None], current: Sequence[Tensor], in_place: bool) -> list[Tensor]:
        self._consumed = False
        self._back_to_copies(self._in_place)
        if in_place:  # what is handed out has to lie where a capture keeps its memory
            self._forget_sets()
        self._read_in_place(self._inputs.take(inputs, in_place=in_place))
        self._copy_parameters(current)
        made = self._set("forward")
        self._run(made.sequence, self.copying)
        return [*self._handed(made, range(len(made.handed))), *self._shown.handed()]

    def backward(
        self,
        given: Sequence[Tensor | None],
        wanted: tuple[bool, ...],
        keeps: bool = False,
        current: Sequence[Tensor] = (),
        in_place: bool = False,
    ) -> list[Tensor | None]:
        """Run the steps that the wanted gradients need, and return them in the order of the ports, None for others.

        Backward writes over what forward saved for it once that is read. With `keeps`, a copy is put back afterwards.

        Args:
            given: gradients of the outputs, then of what is shown; None stands for zeros.
            wanted: which gradients of the ports' sources.
            keeps: whether it may be called again for the same forward.
            current: the caller's parameters, in the order of `lying`, with the values that forward saw.
            in_place: whether gradients of outputs that lie as the plan says are read where they are.

        Raises:
            RuntimeError: an earlier backward has consumed what forward saved.
        """
        if self._consumed:
            raise RuntimeError(
                "backward ran already, and has used the memory of what forward saved; run forward again, or keep what "
                "it saved: retain_graph=True, or keeps=True in the earlier backward"
            )
        with self._turn():
            if self.parameters.have_others_moved(current):
                self._copy_parameters(current)
            copies = [tensor.clone() for tensor in self._saved] if keeps else None
            try:
                return self._backward(given, wanted, in_place)
            finally:
                if copies is None:
                    self._consumed = True
                    if self.in_capture:
                        self.let_go()
                    else:
                        self._back_to_copies(self._in_place)
                else:
                    for tensor, copy in zip(self._saved, copies, strict=True):
                        tensor.copy_(copy)

    def restore(self, state: Tensor, current: Sequence[Tensor]) -> None:
        """Take up what a forward elsewhere left for backward, which runs here then.

        Args:
            state: its `state`, on any device.
            current: the caller's parameters, in the order of `lying`, with the values that forward saw.
        """
        with self._turn():
            self._consumed = False
            self._back_to_copies(self._in_place)
            self._copy_parameters(current)
            for copy in self.copying:
                copy()
            self.state.copy_(state)

    def _backward(
        self, given: Sequence[Tensor | None], wanted: tuple[bool, ...], in_place: bool
    ) -> list[Tensor | None]:
        self._back_to_copies(self._in_place & set(self.plan.given.values()))
        count = len(self._given.tensors)
        self._read_in_place(self._given.take(given[:count], in_place=in_place))
        self._shown.take(given[count:])
        made = self._set("backward")
        self._run(made.sequence_for(wanted))
        handed = iter(self._handed(made, [number for number, want in enumerate(wanted) if want]))
        return [next(handed) if want else None for want in wanted]

    def _read_in_place(self, views: Mapping[Place, Tensor]) -> None:
        """Have the steps read the caller's memory, where there is some."""
        if views:
            self._in_place |= views.keys()
            self._look_at(views)

    def _look_at(self, views: Mapping[Place, Tensor]) -> None:
        """Build the steps that read these places anew on other memory, and forget the calls on outputs."""
        self.views |= views
        with torch.inference_mode(False), torch.no_grad():
            for number in self.inside:
                if not views.keys().isdisjoint(self.plan.steps[number].inputs):
                    self.inside[number] = self.built(number, self.views)
        self._forget_sets()

    def _forget_sets(self) -> None:
        if self.cuda is not None and self.cuda.is_capturing():
            self._outlived += [*self._sets["forward"], *self._sets["backward"], *self._spare.values()]
        self._sets = {"forward": [], "backward": []}
        self._spare = {}
        if self._graphs is not None:
            self._graphs.forget()

    def _back_to_copies(self, places: Set[Place]) -> None:
        """Have the steps read these places in the workspace's own memory again."""
        if places:
            shown: dict[Place, Tensor] = {}
            for number in {self.plan.buffer_of[place] for place in places}:
                self.show(number, self._memory(number), shown)
            self._in_place = self._in_place - places
            self._look_at({place: shown[place] for place in places})

    def tidy(self) -> None:
        """Drop what a capture has outlived, once nothing is captured."""
        if self._outlived and self.cuda is not None:
            with self.cuda.guard():
                if not self.cuda.is_capturing():
                    self._outlived = []

    def let_go(self) -> None:
        """Give up the caller's memory that was read in place, and the steps built on it; nothing runs here again."""
        if self._in_place:
            for number in [*self.inside]:
                if not self._in_place.isdisjoint(self.plan.steps[number].inputs):
                    del self.inside[number]
            for place in self._in_place:
                del self.views[place]
            self._in_place = set()
            self._forget_sets()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """On CUDA, have the device current, and everything in order with what ran here on another stream."""
        if self.cuda is None:
            yield
            return
        with self.cuda.guard():
            if self.cuda.is_capturing():
                # Whoever captures has waited for all that was queued before, and nothing may be waited for now.
                self.in_capture = True
            else:
                if self.scratch is not None:
                    self.scratch.turn(self.cuda)
                self._order.turn(self.cuda, self._own())
            yield

    def _own(self) -> Iterator[Tensor]:
        """Yield a tensor of each storage that was allocated here."""
        yield self._arena
        if self._beyond is not None:
            yield self._beyond
        yield from self.parameters.bases.values()
        yield from self._shown.memory()
        yield from self.held.values()
        for made in (*self._sets["forward"], *self._sets["backward"], *self._spare.values()):
            yield from made.handed

    def _run(self, sequence: CallSequence, copying: Sequence[Run] = ()) -> None:
        if self.skips_kernels:
            for copy in copying:
                copy()
        elif self._graphs is None:
            sequence.run()
        else:
            self._graphs.run(sequence)

    def _handed(self, made: OutputSet, numbers: Iterable[int]) -> list[Tensor]:
        is_spare = made is self._spare.get(made.phase)
        self.copies += is_spare
        return [
            copy_of(made.handed[number]) if is_spare or number in made.held else made.handed[number].detach()
            for number in numbers
        ]

    def _set(self, phase: str) -> OutputSet:
        """Return a set that nobody outside holds; where all are held, the spare one, whose results are copied."""
        sets = self._sets[phase]
        for found in sets:
            if found.is_free():
                return found
        if len(sets) < SETS:
            sets.append(OutputSet(self, phase))
            return sets[-1]
        if phase not in self._spare:
            self._spare[phase] = OutputSet(self, phase)
        return self._spare[phase]

    def _memory(self, number: int) -> Tensor:
        """Return the elements of one of the arena's buffers: in its own memory, or in the scratch behind that."""
        buffer = self.plan.buffers[number]
        memory, start = self._arena, buffer.start_bytes
        if self._beyond is not None and start >= self.plan.kept_bytes:
            memory, start = self._beyond, start - self.plan.kept_bytes
        return self._part(memory, start, number)

    def _part(self, memory: Tensor, start: int, number: int) -> Tensor:
        """Return the elements of a buffer that begins at a byte of some memory."""
        buffer = self.plan.buffers[number]
        return memory[start : start + buffer.size_bytes].view(getattr(torch, buffer.dtype))

    def base(self, number: int) -> Tensor:
        """Allocate a buffer."""
        buffer = self.plan.buffers[number]
        return torch.empty(buffer.elements, dtype=getattr(torch, buffer.dtype), device=self.device)

    def show(self, number: int, base: Tensor, views: dict[Place, Tensor]) -> None:
        """Add a view of each place of a buffer that begins where `base` begins."""
        for place, offset in self.plan.buffers[number].offsets.items():
            views[place] = base.as_strided(
                self.plan.shape(place), self.plan.strides(place), base.storage_offset() + offset
            )

    def _copied(self, apart: Iterable[int], current: Sequence[Tensor], *, moving: bool) -> ParameterCopies:
        """Allocate these buffers for copies of parameters, and show what lies in them."""
        copies = ParameterCopies(self._lying, apart, current, moving=moving, allocate=self.base)
        for number, base in copies.bases.items():
            self.show(number, base, self.views)
        return copies

    def _copy_parameters(self, current: Sequence[Tensor]) -> None:
        """Copy parameters that may have other memory each time; where another one has moved, all from now on."""
        if self.parameters.have_others_moved(current):
            with torch.inference_mode(False), torch.no_grad():
                self.parameters = self._copied({lies.buffer for lies in self._lying}, current, moving=True)
                self.inside = self._built_inside()
            self._forget_sets()
        self.parameters.take(current)

    def stages(self) -> list[Tensor]:
        """Return the memory that inputs and gradients of the outputs are copied to."""
        return [*self._inputs.tensors, *self._given.tensors]

    def calls(self, phase: str) -> Mapping[int, Run]:
        """Return a call for each step of a phase, by number; none of them gets what is handed in or out."""
        return self._set(phase).calls

    def _built_inside(self) -> dict[int, Run]:
        """Build the steps that touch nothing which is handed out."""
        return {
            number: self.built(number, self.views)
            for number, step in enumerate(self.plan.steps)
            if all(place is None or place in self.views for place in (*step.inputs, *step.outputs))
        }

    def built(self, number: int, views: Mapping[Place, Tensor]) -> Run:
        """Build a step on operands declared as its record declares them, over the same elements."""
        step = self.plan.steps[number]
        call = step.call
        operands: list[Tensor | None] = []
        for place, tensor, form in zip(
            (*step.inputs, *step.outputs), call.subgraph.boundary, call.candidate.parsed_forms(), strict=True
        ):
            if place is None:
                operands.append(None)
                continue
            declared = call.subgraph.tensors[tensor]
            lies = form.stored(declared.dtype, declared.axes, declared.extents)
            view = views[place]
            operands.append(view.as_strided(lies.extents, lies.strides, view.storage_offset()))
        count = len(step.inputs)
        run: Run = KERNELS[call.candidate.kernel].builder()(call, operands[:count], operands[count:])
        return self._shown.with_step(number, run, views)
