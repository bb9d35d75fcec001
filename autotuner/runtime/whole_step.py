"""A whole training step as one graph: forward, loss, backward, clipping and the optimizer's step.

A captured step runs no Python. So a graph is for one structure of batches, and for all that Python has decided: modes
of modules, frozen parameters, hyperparameters, autocast. Each combination has a graph of its own. Where parameters,
buffers or the optimizer's state have moved to other memory, all graphs are made anew.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotuner.errors import InputError, first_cause
from autotuner.runtime.batches import UnknownBatchError, apart, batch_of, structure_of
from autotuner.runtime.capturable import RateTensors, hyperparameters, make_capturable, refusal
from autotuner.runtime.combinations import CHANGES, COMBINATIONS, LIMITED, PATIENCE, Recorded, remembered
from autotuner.runtime.devices import DeviceRuntime, device_runtime
from autotuner.runtime.fallbacks import TALLY, warn
from autotuner.runtime.gradient_exchange import GradientExchange
from autotuner.runtime.group_end import close_before_groups
from autotuner.runtime.host_randomness import HostRandomness
from autotuner.runtime.model_memory import ModelMemory
from autotuner.runtime.padding.calls import PaddedCalls
from autotuner.runtime.padding.report import PaddingReport
from autotuner.runtime.plain_step import Loss, PlainStep
from autotuner.runtime.scratch import Scratch, sharing
from autotuner.runtime.step_budget import StepBudget
from autotuner.runtime.step_needs import FrontPoint, StepNeeds
from autotuner.runtime.step_times import StepShare, StepTimes
from autotuner.runtime.updates_in_backward import UpdatesInBackward


class WholeStep:
    """A training step of a model: `loss = step(batch)`; gradients are None before and after it.

    Attributes:
        replays: how many steps were replayed.
        plain: how many ran operator by operator.
        note: why steps are not captured, if they are not.
        gradient_norm: the norm of all gradients before clipping, in the last step, where `max_norm` is given.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        *,
        max_norm: float | None = None,
        recorder: DeviceRuntime | None = None,
        max_graphs: int = 4,
        uncaptured: Callable[[], Loss] | None = None,
        budget_bytes: int | None = None,
        in_backward: UpdatesInBackward | None = None,
        padded_calls: PaddedCalls | None = None,
        exchange: GradientExchange | None = None,
        refused: str | None = None,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            model: whose parameters the optimizer moves.
            optimizer: of these.
            loss: forward and loss of a batch.
            max_norm: gradients are scaled down where their norm is larger.
            recorder: the device, which captures steps; None for no graphs.
            max_graphs: so many combinations are captured; steps of any other run operator by operator.
            uncaptured: makes the loss anew for steps that turn out not to be captured.
            budget_bytes: that a step may need, everything in it; regions that were compiled with a choice keep to it.
            in_backward: updates parameters as soon as their gradients are there; not with `max_norm`.
            padded_calls: pads batches of further shapes; None for steps of each shape by itself.
            exchange: with other processes that train the model, each its own batches.
            refused: why steps are not to be captured; None where they may be.
        """
        self._model, self._optimizer = model, optimizer
        self._plain = PlainStep(model, optimizer, loss, max_norm, in_backward, exchange)
        self._memory = ModelMemory(model, optimizer)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._limit, self._uncaptured = max_graphs, uncaptured
        self._budget_bytes, self._padded_calls, self._exchange = budget_bytes, padded_calls, exchange
        self._rates = RateTensors(optimizer, self._device)
        self._known: dict[Hashable, Recorded] = {}
        self._pool: Any = None
        self._times = StepTimes(self._device)
        self._scratch = Scratch()
        finalize(self, self._scratch.close)
        self._told_of_limit = self._told_of_changes = False
        self.replays = self.plain = 0
        self.note = ""
        self.gradient_norm: Tensor | None = None
        self._recorder = recorder
        if recorder is not None:
            reason = refused or refusal(optimizer)
            if reason is None and exchange is not None and not exchange.can_be_captured:
                reason = "several processes exchange gradients by another backend than NCCL"
            if reason is not None:
                self._give_up(reason)
            elif exchange is not None:
                close_before_groups(self)
        self._plain.agree(self._device, self._recorder is not None)

    def __call__(self, *batches: Any) -> Tensor:
        """Run one training step, and return its loss, detached.

        Args:
            batches: one batch, or several micro-batches: then the loss is the mean of theirs, and gradients are those
                of the mean. Tensors are moved to the model's device.

        Raises:
            InputError: no batch, or a loss that has not one element.
        """
        if not batches:
            raise InputError("a training step needs a batch: step(batch), or step(first, second) for micro-batches")
        if self._padded_calls is None:
            return self._stepped(batches)
        call = self._padded_calls.fitted(batches, self._modes())
        with self._padded_calls.timed(call):
            return self._stepped(call.batches)

    def close(self) -> None:
        """Let all graphs go, with their memory; steps that come later are captured anew.

        Of several processes, this happens by itself before torch's process group is destroyed.
        """
        self._forget()

    def optimizer_state(self) -> dict[str, Any] | None:
        """Return the optimizer's `state_dict()`; where processes share it out, all of it, in the first; None elsewhere.

        All processes that train the model call it together. What it returns can be loaded in each of them, or in one.

        Raises:
            PeerLostError: another process has ended.
        """
        return self._optimizer.state_dict() if self._exchange is None else self._exchange.whole_state()

    def expect(self, batch: Any) -> None:
        """Have batches be padded to the shape of a batch, which is tuned, before a step with it has run."""
        if self._padded_calls is not None:
            self._padded_calls.expect(batch, self._modes())

    def _stepped(self, batches: Sequence[Any]) -> Tensor:
        tensors: list[Tensor] = []
        try:
            structure = structure_of(batches, tensors)
        except UnknownBatchError as error:
            if self._budget_bytes is not None:
                raise InputError(
                    f"memory_budget goes with batches of tensors, in mappings, lists or tuples, and {error}"
                ) from None
            self._give_up(str(error))
            self._meet()
            return self._run_plainly(batches)
        if self._recorder is None:
            recorded = None if self._budget_bytes is None else self._recorded((structure, self._modes()))
            self._meet()
            return self._run_plainly(self._moved(structure, tensors), recorded)
        return self._run_captured(self._recorder, structure, tensors)

    def __str__(self) -> str:
        captured = sum(each.replay is not None for each in self._known.values())
        said = f"{self.replays:,} of {self.replays + self.plain:,} steps were replayed, from {captured} CUDA graphs"
        share = self.share
        timed = f"; {share}" if share is not None and share.tuned_us else ""
        needs = "".join(f"; {each}" for each in self.needs)
        padding = f"; {told}" if (told := str(self.padding)) else ""
        others = "" if self._exchange is None else f"; {self._exchange}"
        return (f"{said}; {self.note}{timed}" if self.note else said + timed) + padding + needs + others

    @property
    def padding(self) -> PaddingReport:
        """Counts of the calls that were padded, and of those that were not, by reason."""
        return PaddingReport() if self._padded_calls is None else self._padded_calls.report

    @property
    def needs(self) -> list[StepNeeds]:
        """Needs of steps under a memory budget, a value for each shape and mode that there was."""
        budgets = [each.budget for each in self._known.values() if each.budget is not None]
        return [budget.needs for budget in budgets if budget.needs is not None]

    @property
    def fronts(self) -> list[tuple[FrontPoint, ...]]:
        """Predictions of steps under other budgets, for each shape and mode in `needs`."""
        return [each.budget.front() for each in self._known.values() if each.budget and each.budget.needs is not None]

    @property
    def share(self) -> StepShare | None:
        """The time of a step, and the part of it that tuned regions take; None before the third step."""
        return self._times.share()

    @property
    def is_settled(self) -> bool:
        """True where steps of all shapes and modes so far run as they will from now on: decided, and captured."""
        return all(each.replay or (self._recorder is None and each.is_warm) for each in self._known.values())

    def trains(self, model: nn.Module) -> bool:
        """Say whether it is a step of a model, or of one that holds or wraps it."""
        return any(part is self._model for part in model.modules()) or any(
            part is model for part in self._model.modules()
        )

    def _run_captured(self, recorder: DeviceRuntime, structure: Hashable, tensors: Sequence[Tensor]) -> Tensor:
        is_stale = self._exchange is not None and self._exchange.has_new_buckets()
        if is_stale or self._memory.has_moved() or not self._known:
            self._forget()
            make_capturable(self._optimizer, self._device)
            self._memory.note()
        key = (structure, self._decided())
        recorded = self._recorded(key)
        if self._meet(recorded):
            self._capture(recorder, recorded, structure, tensors)
        if self._exchange is not None:
            self._exchange.have_captured(recorded.replay is not None)
        if recorded.replay is None:
            return self._run_aside(recorded, self._moved(structure, tensors))
        with torch.no_grad():
            for own, given in zip(recorded.inputs, tensors, strict=True):
                own.copy_(given, non_blocking=True)
        self._rates.follow()
        began = self._times.now()
        recorded.replay()
        self._times.keep(began, recorded.tuned_us)
        self.replays += 1
        loss, norm = (None if each is None else each.clone() for each in recorded.results)  # replays write to their own
        self.gradient_norm = norm
        assert loss is not None
        return loss

    def _meet(self, recorded: Recorded | None = None) -> bool:
        """Say whether a step is to be captured now; all processes that train the model say how they run it."""
        is_ready = recorded is not None and recorded.replay is None and recorded.is_warm and self._is_free()
        if self._exchange is None:
            return is_ready
        return self._exchange.captures(is_ready, recorded is not None and recorded.replay is not None)

    def _run_aside(self, recorded: Recorded, batches: Sequence[Any]) -> Tensor:
        """Run a step on the stream that captures: torch's advice for what comes before a capture."""
        if self._recorder is None:
            return self._run_plainly(batches, recorded)
        is_before_capture = not recorded.is_warm or (self._exchange is not None and recorded.runs < PATIENCE)
        recorded.runs += 1
        # What such a step keeps would lie beside the graph's own memory.
        scratch = Scratch(is_of_one_step=True) if is_before_capture else self._scratch
        with self._recorder.aside(), self._rates.in_groups():
            if recorded.budget is not None:
                loss, self.gradient_norm = self._run_under(recorded.budget, batches)
            else:
                with sharing(scratch):
                    loss, self.gradient_norm = self._run(batches)
            self._note_memory(self._recorder)
        if is_before_capture:
            self._times.forget()
        self.plain += 1
        return loss.clone()

    def _run_plainly(self, batches: Sequence[Any], recorded: Recorded | None = None) -> Tensor:
        self.plain += 1
        budget = None if recorded is None else recorded.budget
        loss, self.gradient_norm = self._run(batches) if budget is None else self._run_under(budget, batches)
        if budget is not None:
            self._note_memory(device_runtime(self._device))
            if not budget.is_settled:
                self._times.forget()
        return loss

    def _note_memory(self, runtime: DeviceRuntime) -> None:
        """Note where everything is; state that the optimizer has made among what a step needed is gathered first."""
        if self._memory.has_tensors_elsewhere():  # the shape that was compiled has moved parameters
            self._forget(graphs_only=True)
        runtime.gather(self._memory.new_state())
        self._memory.note()

    def _run_under(self, budget: StepBudget, batches: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        """Run a step; where it finds no memory while ways are chosen, run it from its beginning with leaner ones."""
        while True:
            put_back = None if budget.is_settled else self._plain.beginning(device_runtime(self._device))
            try:
                with budget.step():
                    return self._run(batches)
            except torch.OutOfMemoryError:
                if put_back is None or not put_back() or not budget.ran_out():
                    raise

    def _run(self, batches: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        """Run a step operator by operator, take its time, and return loss and norm."""
        began, before_us = self._times.now(), TALLY.region_us
        found = self._plain.run(batches)
        self._times.keep(began, TALLY.region_us - before_us)
        return found

    def _capture(
        self, recorder: DeviceRuntime, recorded: Recorded, structure: Hashable, tensors: Sequence[Tensor]
    ) -> None:
        inputs = [tensor.detach().to(self._device, copy=True) for tensor in tensors]
        batches = batch_of(structure, iter(inputs))
        budget = recorded.budget
        updates = self._plain.updates(self._device)

        def run() -> None:
            before_us = TALLY.region_us
            # Scratch lies in the graph's own memory, which outlives all else.
            with sharing(Scratch()) if budget is None else budget.step(captured=True):
                recorded.results[:] = self._plain.run(batches, updates.step)
            recorded.tuned_us = TALLY.region_us - before_us

        if self._pool is None:
            self._pool = recorder.pool()
        torch.clear_autocast_cache()
        before = HostRandomness()
        replay, reason, ran_out = None, "", False
        meter = None if budget is None else recorder.meter()
        try:
            with self._rates.in_groups():
                replay = recorder.captured(run, self._pool, budget.repeats if budget else 0, is_whole_step=True)
        except Exception as error:
            reason = f"the step could not be captured ({first_cause(error)})"
            ran_out = isinstance(error, torch.OutOfMemoryError)
        self._plain.clear_gradients()
        reserved_bytes = 0 if meter is None else meter.stop()[1] + meter.others_bytes
        is_changed = budget is not None and (
            budget.ran_out() if ran_out else replay is not None and budget.chooses_again(reserved_bytes)
        )
        reason = "" if is_changed else reason
        if before.restore():
            reason = reason or "the model draws random numbers on the host in each step"
        if self._memory.has_moved():
            self._memory.put_back()
            reason = reason or "the model replaces a parameter or a buffer in each step"
        if reason:
            self._give_up(reason)
        elif is_changed:
            recorded.results.clear()  # they lie in the graph's memory, which goes with it
            del replay
            if all(each.replay is None for each in self._known.values()):
                self._pool = None  # memory whose graphs are all gone cannot be captured into again
        else:
            recorded.replay, recorded.inputs, recorded.updates = replay, inputs, updates.written()

    def _recorded(self, key: Hashable) -> Recorded:
        """Return what is known of a combination."""
        known = self._known
        if key not in known:
            if len(known) >= COMBINATIONS:
                if self._recorder is not None and not self._told_of_changes:
                    self._told_of_changes = True
                    warn(CHANGES)
                known = self._known = remembered(known)
            made = known[key] = Recorded()
            if self._budget_bytes is not None:
                made.budget = StepBudget(
                    self._budget_bytes, device_runtime(self._device),
                    partial(self._memory.static_bytes, frees_gradients=self._plain.frees_gradients),
                    keeps=self._recorder is None and not self._plain.frees_gradients,
                )  # fmt: skip
        return known[key]

    def _is_free(self) -> bool:
        """Say whether one more graph may be captured."""
        if sum(each.replay is not None for each in self._known.values()) < self._limit:
            return True
        if not self._told_of_limit:
            self._told_of_limit = True
            warn(LIMITED.format(self._limit))
        return False

    def _give_up(self, reason: str) -> None:
        """Capture nothing from now on."""
        if self._recorder is None:
            return
        warn(f"a training step is not captured as a CUDA graph: {reason}")
        self.note = f"not captured: {reason}"
        self._recorder = None
        self._forget()
        if self._uncaptured is not None:
            self._plain.loss = self._uncaptured()

    def _forget(self, *, graphs_only: bool = False) -> None:
        if self._known and not (self._exchange and self._exchange.peers.is_lost):
            device_runtime(self._device).synchronize()  # a replay may still run
        for each in self._known.values():
            each.let_go()
        self._known = self._known if graphs_only else {}
        self._pool = None  # memory whose graphs are all gone cannot be captured into again

    def _moved(self, structure: Hashable, tensors: Sequence[Tensor]) -> Any:
        return batch_of(structure, apart(tensor.to(self._device, non_blocking=True) for tensor in tensors))

    def _decided(self) -> Hashable:
        """Return what Python decides in a step, beside what the batch says."""
        return hyperparameters(self._optimizer), self._modes()

    def _modes(self) -> Hashable:
        """Return how the model computes: autocast, and the modes of its modules and parameters."""
        kind = self._device.type
        return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind), self._memory.modes()
