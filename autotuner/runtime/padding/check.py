"""Checks, on a few tokens, that a padded batch has the loss and the gradients of the batch without padding."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from autotuner.runtime.batches import IGNORED
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.host_randomness import HostRandomness
from autotuner.runtime.padding.batches import BatchForm, Entry, Extents, NotPaddedError
from autotuner.runtime.padding.constant_draws import ConstantDraws, UnknownDrawError
from autotuner.runtime.padding.module_state import ModuleState, unlike
from autotuner.runtime.padding.rules import config_of, free, refused

ROWS, LENGTH, ADDED = 3, 9, 5
"""Sequences and tokens of the batch that is tried, and how many more the padded one has."""
ORDINARY, OTHERS = ("full", "right"), ("left",)
"""Places of the padding that the rows which are tried have of their own: none or the right; the left and within."""
FACTORS = 1 << 20
"""Numbers that a gradient is multiplied by, again and again."""
READ = 65_536
"""Elements of a user's tensor that are looked at, at most, for values that tokens and labels may have."""
TOLERANCES = {torch.float64: (2e-6, 1e-5, 3e-7), torch.float32: (1e-5, 1e-4, 3e-6)}
"""Differences that are rounding, by the type that is computed in: of the loss, as a share of it; of a gradient, as a
share of its norm, and as a share of the largest norm of all gradients. Models compute parts of a forward in float64,
such as softmax, in float32. Types of 16 bits would hide what matters, and are not tried."""


@dataclass(frozen=True)
class Sample:
    """Values of a step that two batches are compared by.

    Args:
        loss: of the batch.
        prints: of each parameter's gradient, its norm and its product with fixed numbers that look random.
        kept: buffers behind the step, and tensors that it has put into attributes of modules, by their names.
    """

    loss: float
    prints: dict[str, tuple[float, float]]
    kept: dict[str, Tensor]

    @property
    def is_finite(self) -> bool:
        return all(map(isfinite, (self.loss, *(each for both in self.prints.values() for each in both))))


@dataclass(frozen=True)
class PaddingCheck:
    """A check of a model with its loss.

    Args:
        model: that is trained.
        objective: forward and loss of a batch, which calls the model; not compiled.
        token: the number of the token that stands for padding.
        ignores: whether the loss is known to leave out labels of -100. On a GPU, a label that is out of range ends the
            process; so any other loss is tried with a batch that has a label of -100 itself.
    """

    model: nn.Module
    objective: Callable[[Any], Tensor]
    token: int
    ignores: bool = False

    def refusal(
        self, batch: Mapping[str, Any], form: BatchForm, given: Extents, wanted: Extents, patterns: Sequence[str]
    ) -> str | None:
        """Say why batches of a form are not padded along some axes, or None where nothing changes by it.

        A few rows of a few tokens, with values out of a user's batch, run with and without padding, forward and
        backward, in float64. Dropout is off, and other random numbers are constant. What modules keep for later steps
        is compared, too. Parameters, buffers, attributes of modules and generators are as before.

        Args:
            batch: of the user, for its values.
            form: of the batch.
            given: extents of the batch.
            wanted: extents to which it would be padded: those that are larger are checked.
            patterns: ORDINARY or OTHERS; without a mask, rows have no padding.

        Raises:
            NotPaddedError: this batch has no label to try it with; another one may.
        """
        if (reason := refused(self.model)) is not None:
            return reason
        where = " and ".join(
            (["rows"] if wanted[0] > given[0] else []) + (["columns"] if wanted[1:] > given[1:] else [])
        )
        found: str | None = None
        for dtype in TOLERANCES:
            try:
                found = self._tried(batch, form, given, wanted, patterns, dtype)
                return None if found is None else f"with more {where}, {found}{self._hint()}"
            except NotPaddedError:
                raise
            except UnknownDrawError as error:
                return str(error)
            except torch.OutOfMemoryError:
                return "there is no memory to try it with a few tokens"
            except Exception as error:  # whatever a model raises
                words = str(error).strip().partition("\n")[0]
                found = f"on a few tokens, with more {where}, it raised {type(error).__name__}: {words}"
            finally:
                gc.collect()  # parameters in another type lie in circles with what hooks note
                free(_device(self.model))
        return found

    def _tried(
        self, batch: Mapping[str, Any], form: BatchForm, given: Extents, wanted: Extents, patterns: Sequence[str],
        dtype: torch.dtype,
    ) -> str | None:  # fmt: skip
        """Say which value differs in a type; raises whatever the model does."""
        small, large = _extents_of_a_trial(given, wanted)
        with self._undone():
            step = _Step(self.model, self.objective, dtype)
            for pattern in patterns:
                plain_batch = self._small(batch, form, small, pattern)
                found = self._compared(step, plain_batch, form.padded(plain_batch, large, self.token))
                if found is not None:
                    return found
        return None

    def _compared(self, step: "_Step", plain_batch: Mapping[str, Any], padded_batch: Mapping[str, Any]) -> str | None:
        """Say which value differs."""
        loss_share, own_share, all_share = TOLERANCES[step.dtype]
        plain = step.sample(plain_batch)
        draws = plain.is_finite and step.draws(plain_batch, plain)
        with ConstantDraws() if draws else nullcontext():  # type: ignore[no-untyped-call]
            plain = step.sample(plain_batch) if draws else plain
            padded = step.sample(padded_batch)
        if not (plain.is_finite and padded.is_finite):  # in float64, masks may be more than softmax in float32 takes
            raise ArithmeticError(f"the loss is {padded.loss:.6g}, and a gradient may be no number")
        if not abs(padded.loss - plain.loss) <= loss_share * abs(plain.loss):
            return f"its loss of a few tokens is {padded.loss:.6g} in place of {plain.loss:.6g}"
        if plain.prints.keys() != padded.prints.keys():
            name = min(plain.prints.keys() ^ padded.prints.keys())
            return f"{name} gets a gradient, or does without"
        largest = max((norm for norm, _ in plain.prints.values()), default=0.0)
        for name, (norm, product) in plain.prints.items():
            others = padded.prints[name]
            apart = max(abs(norm - others[0]), abs(product - others[1]))
            if not apart <= own_share * norm + all_share * largest:
                return f"the gradient of {name} is another one"
        other = unlike(padded.kept, plain.kept, own_share)
        return None if other is None else f"{other}, which later steps may read, is another one"

    def _hint(self) -> str:
        has_routers = getattr(config_of(self.model), "output_router_logits", False) is True
        return " (the auxiliary loss of its routers counts padding)" if has_routers else ""

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Put back modes and generators at the end, and run nothing compiled meanwhile."""
        runtime = device_runtime(_device(self.model))
        modes = {module: module.training for module in self.model.modules()}
        host = HostRandomness()
        try:
            with (
                runtime.forked_random(), torch.enable_grad(), torch.autocast(runtime.device.type, enabled=False),
                torch.compiler.set_stance("force_eager"), _without_dropout(self.model),
            ):  # fmt: skip
                yield
        finally:
            host.restore()
            for module, mode in modes.items():
                module.training = mode

    def _small(self, batch: Mapping[str, Any], form: BatchForm, extents: Extents, pattern: str) -> dict[str, Any]:
        """Return a batch of a few tokens with values of a user's; labels are where tokens are.

        Args:
            pattern: of ORDINARY or OTHERS.
        """
        rows = torch.arange(extents[0], device="cpu")[:, None]
        there = []
        for length in extents[1:]:
            lengths = length if pattern == "full" else (length // (rows + 1)).clamp(min=1)
            places = torch.arange(length, device="cpu")
            is_there = (places < lengths).expand(extents[0], length).clone()
            if pattern == "left":
                is_there = is_there.flip(1)
                is_there[1:, -2:-1] = False  # and one within
            there.append(is_there)
        made = dict(batch)
        for entry in form.entries:
            shape = [extents[axis] for axis in entry.axes]
            seen = there[entry.axes[1] - 1] if len(entry.axes) > 1 else None
            tensor = batch[entry.name]
            made[entry.name] = self._values(entry, tensor, shape, seen).to(_device(self.model), entry.dtype)
        for name, value in made.items():
            if isinstance(value, Tensor):
                made[name] = value.to(_device(self.model))
        return made

    def _values(self, entry: Entry, tensor: Tensor, shape: list[int], seen: Tensor | None) -> Tensor:
        if entry.kind == "mask":
            assert seen is not None
            return seen
        if entry.kind == "positions":
            return torch.arange(shape[-1], device="cpu").expand(*shape)
        found = tensor.detach().flatten()[:READ].cpu()
        padding = None
        if entry.kind == "tokens":
            padding = self.token
        elif entry.kind == "labels" and not entry.dtype.is_floating_point:
            padding = IGNORED
        kept = found if padding is None else found[found != padding]
        if padding == IGNORED and not self.ignores and len(kept) == len(found):
            raise NotPaddedError("no label of a batch is -100, and so it is not known whether the loss leaves that out")
        if not len(kept):
            if padding == IGNORED:
                raise NotPaddedError("a batch has no label to try padding with")
            kept = found
        count = torch.Size(shape).numel()
        made = kept.repeat(-(-count // len(kept)))[:count].reshape(shape)
        return made if padding is None or seen is None else made.masked_fill(~seen, padding)


def _extents_of_a_trial(given: Extents, wanted: Extents) -> tuple[Extents, Extents]:
    """Return the extents of what is tried, without and with padding; no length is above that of a user's batch."""
    small, large = [ROWS], [ROWS + ADDED if wanted[0] > given[0] else ROWS]
    for own, limit in zip(given[1:], wanted[1:], strict=True):
        is_padded = limit > own
        large.append(min(LENGTH + ADDED if is_padded else LENGTH, limit))
        small.append(min(LENGTH, large[-1] - is_padded))
    return tuple(small), tuple(large)


class _Step(nn.Module):
    """Forward, loss and backward of a model with its parameters in another type."""

    def __init__(self, model: nn.Module, objective: Callable[[Any], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self._objective, self.dtype = model, objective, dtype
        self._runtime = device_runtime(_device(model))
        with torch.no_grad():
            self._tensors = {
                name: (each.to(dtype, copy=True) if each.is_floating_point() else each.clone()).detach()
                for name, each in (*self.named_parameters(), *self.named_buffers())
            }
        self._prints: dict[str, tuple[Tensor, Tensor]] = {}
        self._factors = torch.arange(FACTORS, dtype=dtype, device=_device(model)).mul_(12.9898).add_(1.0).sin_()
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                own = self._tensors[name].requires_grad_()
                noting = self._noting(name.removeprefix("model."))
                own.register_post_accumulate_grad_hook(noting)  # type: ignore[no-untyped-call]
        self._buffers_before = {name: self._tensors[name].clone() for name, _ in self.named_buffers()}
        self._host, self._drawn = HostRandomness(), self._runtime.drawn_so_far()
        self._state = ModuleState(model)

    def forward(self, batch: Any) -> float:
        """Run forward and backward: a checkpoint runs its forward again in backward, and needs the same parameters."""
        loss = self._objective(batch)
        torch.autograd.backward(loss)
        return float(loss.detach())

    def sample(self, batch: Mapping[str, Any], again: bool = True) -> Sample:
        """Run a batch.

        Args:
            batch: a loss gets a copy of it, as in a step, since some take labels out.
            again: whether it draws the numbers that the first one drew.
        """
        if again:
            self._host.restore()
            self._drawn()
        with torch.no_grad():
            for name, before in self._buffers_before.items():
                self._tensors[name].copy_(before)
        self._prints = {}
        own = {name: each.clone() if isinstance(each, Tensor) else each for name, each in batch.items()}
        tensors = dict(self._tensors)
        try:
            loss: float = torch.func.functional_call(self, tensors, (own,))
            kept = {name: tensors[name].detach().clone() for name in self._buffers_before} | self._state.replaced()
        finally:
            self._state.restore()
        prints = {name: (float(norm), float(product)) for name, (norm, product) in self._prints.items()}
        return Sample(loss, prints, {name.removeprefix("model."): each for name, each in kept.items()})

    def draws(self, batch: Mapping[str, Any], first: Sample) -> bool:
        """Say whether a step comes out otherwise with other random numbers."""
        apart = abs(self.sample(batch, again=False).loss - first.loss)
        return not apart <= TOLERANCES[torch.float64][0] * abs(first.loss)

    def _noting(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            norm, product = gradient.norm(), gradient.new_zeros(())
            for part in torch.split(gradient.flatten(), len(self._factors)):
                product += part @ self._factors[: len(part)]
            before = self._prints.get(name)  # a checkpoint may add to a gradient in parts
            self._prints[name] = (norm, product) if before is None else (before[0] + norm, before[1] + product)

        return note


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Set the probabilities of dropout to 0 for a while: those of modules, and numbers that modules name so."""
    changed: list[tuple[dict[str, Any], str, float]] = []
    for module in model.modules():
        own = module.__dict__
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        names = [name for name, value in own.items() if isinstance(value, float) and (is_dropout or "drop" in name)]
        changed += [(own, name, own[name]) for name in names]
    try:
        for own, name, _ in changed:
            own[name] = 0.0
        yield
    finally:
        for own, name, before in changed:
            own[name] = before


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
