"""Tuned regions and layers in a model that torch.compile compiles: one opaque operator, with a backward of its own.

torch.ops.autotuner.tuned_region(number, like, inputs, parameters, results, key) -> (outputs, state). A region is a
connected part of a model's forward with any number of inputs, parameters and outputs, or a whole tuned layer. The
compiler sees nothing of what runs. What it is told about results is a text, a constant of the compiled code: code that
a cache returns later, perhaps in another process, has the same constants. A number names one place of one model, so
that no two calls with the same arguments are taken for one: two layers would share their dropout masks. A key names
what runs where that is no constant, so that modules that are compiled one by one can share their code.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, library
from torch._C._autograd import _get_current_graph_task_keep_graph

from autotuner.runtime.direct_calls import call_directly
from autotuner.runtime.early_gradients import handed_out, places_of
from autotuner.runtime.gradient_stacks import like_stacked, separated, stacked, without_shared_memory
from autotuner.runtime.output_set import copy_of
from autotuner.runtime.pool import Held, Lease
from autotuner.runtime.saved_state import lease_of, saved_state
from autotuner.runtime.ticket import Ticket, like_ticket, new_number

TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe)
"""It draws random numbers. It makes CUDA graphs of its own, over memory of its own, so the compiler must not record it
in its graphs, whose memory is theirs."""


class Strided(NamedTuple):
    """Element type, shape and strides of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=getattr(torch, self.dtype), device=device)


@dataclass(frozen=True)
class RegionResults:
    """Results of a region as the compiler is told about them.

    Args:
        outputs: as forward returns them.
        gradients: of the inputs, as backward returns them; None for an input that no gradient reaches.
        stacks: of the gradients of parameters; see `gradient_stacks`.
        in_place: whether the inputs, and the gradients of outputs, may be read where they are. Those inputs that
            backward reads are saved for it then.
        state_bytes: of what forward leaves for backward, see `saved_state`; None where that is a ticket, see `ticket`.
        repeats: whether gradients that are differentiated again (`create_graph=True`) are made by plain operators,
            which run the forward once more. All inputs are saved for backward then.
        unreached: for each output, the places among inputs and then parameters that its gradient does not reach, see
            `gradient_paths`; () where each gradient reaches all that `gradients` says.
        read_again: places of the inputs that backward reads.
    """

    outputs: tuple[Strided, ...]
    gradients: tuple[Strided | None, ...]
    stacks: tuple[int, ...]
    in_place: bool = False
    state_bytes: int | None = 1
    repeats: bool = False
    unreached: tuple[tuple[int, ...], ...] = ()
    read_again: tuple[int, ...] = ()

    def kept(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the inputs that are saved for backward."""
        if self.repeats:
            return inputs
        return [inputs[place] for place in self.read_again] if self.in_place else []

    @cached_property
    def told(self) -> list[Strided]:
        """Those gradients of inputs that there are."""
        return [gradient for gradient in self.gradients if gradient is not None]

    def text(self) -> str:
        """Return the text that `parse` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    @cache
    def parse(text: str) -> "RegionResults":
        value = json.loads(text)
        outputs, gradients = (
            tuple(None if each is None else Strided(each[0], tuple(each[1]), tuple(each[2])) for each in value[name])
            for name in ("outputs", "gradients")
        )
        lists = {name: tuple(value[name]) for name in ("stacks", "read_again")}
        lists["unreached"] = tuple(map(tuple, value["unreached"]))
        return RegionResults(**{**value, **lists, "outputs": outputs, "gradients": gradients})

    def reached(
        self, given: Sequence[bool], inputs: Sequence[bool], parameters: Sequence[bool]
    ) -> tuple[list[bool], list[bool]]:
        """Return for each input and each parameter whether its gradient is wanted, and reached by one that is given.

        Args:
            given: for each output, whether its gradient is.
            inputs, parameters: for each of them, whether its gradient is wanted.
        """
        if not self.unreached:
            return list(inputs), list(parameters)
        there = [set(lost) for lost, is_given in zip(self.unreached, given, strict=False) if is_given]
        lost = set.intersection(*there) if there else set[int]()
        both = [want and place not in lost for place, want in enumerate((*inputs, *parameters))]
        return both[: len(inputs)], both[len(inputs) :]

    def wanted(self, inputs: Sequence[bool], parameters: Sequence[bool]) -> list[bool]:
        """Return for each input that a gradient reaches and each parameter whether its gradient is wanted."""
        reached = [want for want, gradient in zip(inputs, self.gradients, strict=True) if gradient is not None]
        return [*reached, *parameters]


class Runs(Protocol):
    """The part of a tuned region, or layer, that the operator calls."""

    def forward(
        self, inputs: Sequence[Tensor], parameters: Sequence[Tensor], *, in_place: bool
    ) -> tuple[list[Tensor], Held]: ...
    def restored(
        self,
        state: Tensor,
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        device: torch.device,
        *,
        in_place: bool,
    ) -> Lease: ...
    def going_back(self) -> AbstractContextManager[None]: ...
    def repeated(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...


_REGIONS: "WeakValueDictionary[int, Runs]" = WeakValueDictionary()


def number_of(region: Runs) -> int:
    """Return a new number that names a region for as long as somebody holds it."""
    number = new_number()
    _REGIONS[number] = region
    return number


def key_of(region: Runs) -> Tensor:
    """Return a new number as a tensor of eight bytes on the host."""
    return torch.tensor([number_of(region)])


def run_forward(
    number: int,
    like: Tensor,  # noqa: ARG001
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    results: str,
    key: Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    """Run a tuned region's forward.

    Args:
        number: `number_of` the region, or of a place where what the key names is called.
        like: any of the tensors once more. Where the compiler repeats an operator that draws random numbers, it looks
            for the device among its arguments, and not in lists.
        inputs: in the order of its ports, any strides.
        parameters: in the order of its ports.
        results: the text of its `RegionResults`.
        key: `key_of` what runs, instead of the number; or None.

    Returns:
        The outputs, and what backward needs; see `saved_state` and `ticket`.

    Raises:
        RuntimeError: the region is gone, or was tuned for other inputs or parameters.
    """
    runs, known = _region(number if key is None else int(key.item())), RegionResults.parse(results)
    with torch._C._DisableAutocast():  # kernels have the types that they were tuned for
        outputs, held = runs.forward(inputs, parameters, in_place=known.in_place)
    if known.state_bytes is None:
        return without_shared_memory(outputs), Ticket.issue(held)
    assert isinstance(held, Lease)
    return without_shared_memory(outputs), saved_state(held)


tuned_region = library.custom_op("autotuner::tuned_region", run_forward, mutates_args=(), tags=TAGS)


def _region(number: int) -> Runs:
    region = _REGIONS.get(number)
    if region is None:
        raise RuntimeError(
            f"the tuned region {number} of this compiled model is gone: compile the model anew (torch.compiler.reset())"
        )
    return region


@tuned_region.register_fake
def _(
    number: int,  # noqa: ARG001
    like: Tensor,
    inputs: Sequence[Tensor],  # noqa: ARG001
    parameters: Sequence[Tensor],  # noqa: ARG001
    results: str,
    key: Tensor | None,  # noqa: ARG001
) -> tuple[list[Tensor], Tensor]:
    known = RegionResults.parse(results)
    if known.state_bytes is None:
        return [output.empty(like.device) for output in known.outputs], like_ticket()
    state = torch.empty(known.state_bytes, dtype=torch.uint8, device=like.device)
    return [output.empty(like.device) for output in known.outputs], state


def run_backward(
    number: int,
    state: Tensor,
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    results: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Run a tuned region's backward.

    Args:
        number: as forward got it.
        state: what forward has left, or a copy of it.
        grads: of the outputs, of which one at least is there; None stands for zeros.
        inputs: those of the forward that `RegionResults.kept` tells, so that what was read in place stays until here.
        parameters: those of the forward, so that torch notices one that was changed in place since.
        results: as forward got it.
        wanted: for each input that a gradient reaches and each parameter, whether its gradient is.

    Returns:
        The wanted gradients of inputs, and a tensor for each stack of parameters of which something is wanted.

    Raises:
        RuntimeError: an earlier backward has consumed what forward saved; or what forward saved is a copy, and the
            region is gone.
    """
    known = RegionResults.parse(results)
    keeps = _get_current_graph_task_keep_graph()
    held: Held | None = Ticket.of(state).held if known.state_bytes is None else lease_of(state)
    again = [inputs[place] for place in known.read_again] if known.repeats else inputs
    if held is None:
        device = next(grad.device for grad in grads if grad is not None)
        restored = _region(number).restored
        held, keeps = restored(state, again, parameters, device, in_place=known.in_place), False
    in_place = known.in_place and isinstance(held, Lease)
    if isinstance(held, Lease) and in_place:
        held.workspace.meet(again)
    region, count = _REGIONS.get(number), len(wanted) - len(parameters)
    places = [*[None] * count, *places_of(number, parameters, wanted[count:])]

    def finish(found: Sequence[Tensor | None]) -> list[Tensor]:
        told = zip(found[:count], known.told, strict=True)
        of_inputs = [as_told(made, lies) for made, lies in told if made is not None]
        of_parameters = stacked(found[count:], parameters, known.stacks, wanted[count:])
        return without_shared_memory([*of_inputs, *of_parameters], grads)  # who takes them over may write to them

    with torch._C._DisableAutocast(), nullcontext() if region is None else region.going_back():
        if isinstance(held, Lease):
            back = held.workspace.backward
            made = back(grads, tuple(wanted), keeps, parameters, in_place, places, finish, results)
        else:
            made = finish(held.backward(grads, tuple(wanted), keeps, parameters, in_place, places))
    split = sum(wanted[:count])
    return [*made[:split], *handed_out(number, parameters, made[split:], known.stacks, wanted[count:])]


tuned_region_backward = library.custom_op(
    "autotuner::tuned_region_backward", run_backward, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)


def as_told(gradient: Tensor, lies: Strided) -> Tensor:
    """Return a gradient with the strides that the compiler was told: what runs in a plan's place may make others."""
    return gradient if gradient.stride() == lies.strides else copy_of(gradient, lies.strides)


@tuned_region_backward.register_fake
def _(
    number: int,  # noqa: ARG001
    state: Tensor,  # noqa: ARG001
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],  # noqa: ARG001
    parameters: Sequence[Tensor],
    results: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    known = RegionResults.parse(results)
    device = next(grad.device for grad in grads if grad is not None)
    reached = [gradient for gradient in known.gradients if gradient is not None]
    count = len(reached)
    of_inputs = [gradient.empty(device) for gradient, want in zip(reached, wanted[:count], strict=True) if want]
    return [*of_inputs, *like_stacked(parameters, known.stacks, wanted[count:])]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], Tensor]) -> None:
    ctx.number, _, of_inputs, parameters, ctx.results, _ = inputs
    kept = RegionResults.parse(ctx.results).kept(of_inputs)
    ctx.ahead = len(kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], *kept, *parameters)


def _backward(ctx: Any, grads: list[Tensor | None], _: Tensor | None) -> tuple[Any, ...]:
    of_inputs, of_parameters = ctx.needs_input_grad[2:4]
    made = _gradients(ctx, grads, of_inputs, of_parameters, torch.ops.autotuner.tuned_region_backward)
    return None, None, *made, None, None


def _gradients(
    ctx: Any,
    grads: Sequence[Tensor | None],
    of_inputs: Sequence[bool],
    of_parameters: Sequence[bool],
    backward: Callable[..., list[Tensor]],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the wanted gradients of inputs and of parameters, None for others."""
    state, *saved = ctx.saved_tensors
    inputs, parameters = saved[: ctx.ahead], saved[ctx.ahead :]
    known = RegionResults.parse(ctx.results)
    of_inputs, of_parameters = known.reached([grad is not None for grad in grads], of_inputs, of_parameters)
    wanted = known.wanted(of_inputs, of_parameters)
    if not any(wanted) or all(grad is None for grad in grads):
        return [None] * len(of_inputs), [None] * len(parameters)
    if torch.is_grad_enabled() and known.repeats:
        gradients = _differentiable(_region(ctx.number), grads, saved, [*of_inputs, *of_parameters])
        return gradients[: ctx.ahead], gradients[ctx.ahead :]
    found = iter(backward(ctx.number, state, grads, inputs, parameters, ctx.results, wanted))
    gradients = [
        next(found) if want and gradient is not None else None
        for want, gradient in zip(of_inputs, known.gradients, strict=True)
    ]
    return gradients, separated(found, known.stacks, of_parameters)


def _differentiable(
    region: Runs, grads: Sequence[Tensor | None], saved: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Return the wanted gradients of inputs and parameters such that they can be differentiated again."""
    with torch._C._DisableAutocast():
        repeated = region.repeated(saved)
    made = [(y, grad) for y, grad in zip(repeated, grads, strict=True) if grad is not None]
    asked = [tensor for tensor, want in zip(saved, wanted, strict=True) if want]
    outputs, given = zip(*made, strict=True)
    found = iter(torch.autograd.grad(outputs, asked, given, create_graph=True, allow_unused=True))
    return [next(found) if want else None for want in wanted]


tuned_region.register_autograd(_backward, setup_context=_remember)


def _refuse(*_: Any) -> None:
    raise RuntimeError(
        "a second derivative through a tuned region: gradients of a region with dropout or with choices, or in a model "
        "that torch.compile compiles, cannot be differentiated again; compute what needs create_graph=True by the "
        "module as it is (autotuner.restore)"
    )


tuned_region_backward.register_autograd(_refuse)
call_directly(tuned_region, run_forward)
call_directly(tuned_region_backward, run_backward)


class RegionStep(torch.autograd.Function):
    """forward(number, count, results, *inputs, *parameters) -> outputs, of so many inputs.

    It is the operator without torch's dispatcher, which takes longer than a small region's kernels take to start.
    """

    @staticmethod
    def forward(ctx: Any, number: int, count: int, results: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, parameters = tensors[:count], tensors[count:]
        with torch._C._DisableAutocast():
            outputs, held = _region(number).forward(inputs, parameters, in_place=RegionResults.parse(results).in_place)
        assert isinstance(held, Lease)
        made = without_shared_memory(outputs)
        ctx.mark_non_differentiable(*(output for output in made if not output.is_floating_point()))
        _remember(ctx, (number, None, inputs, parameters, results, None), (made, saved_state(held)))
        ctx.count = count
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[3:]
        again = torch.is_grad_enabled()
        backward = torch.ops.autotuner.tuned_region_backward if again else run_backward  # the operator can refuse
        of_inputs, of_parameters = _gradients(ctx, grads, wanted[: ctx.count], wanted[ctx.count :], backward)
        return None, None, None, *of_inputs, *of_parameters
