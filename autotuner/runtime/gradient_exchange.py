"""Gradients of several processes, averaged bucket by bucket while backward goes on, and the norm of all.

A bucket is flat memory that gradients are copied to once all of it are there; gradients are views of it from then on.
Buckets are exchanged in one order, the same in all processes.

The first step finds out which parameters get gradients, and in which order; the second takes the time of each, and of
exchanges, and the size of buckets is chosen by it. A parameter without a gradient in one process counts as zeros there;
one that has none in any keeps none, and gets a bucket once one comes.
"""

import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from autotuner.errors import InputError
from autotuner.ir.device import CPU
from autotuner.runtime.bucket_choice import SIZES, Arrival, ExchangeTime, chosen_limit, exposed_us
from autotuner.runtime.bucket_clipping import coefficient
from autotuner.runtime.bucket_plan import FIRST_LIMIT, BucketPlan, arrival
from autotuner.runtime.devices import DeviceRuntime
from autotuner.runtime.gradient_bucket import Bucket
from autotuner.runtime.handed_over import HandedOver, Ready, into_buckets
from autotuner.runtime.parameter_gather import PARTS, ParameterGather
from autotuner.runtime.processes import Peers

PLAIN, READY, REPLAYED = range(3)
"""Ways of a process through a step: operator by operator; so, and it could be captured; as a graph."""
PROBES = SIZES[0], SIZES[5]
"""Bytes of exchanges that are timed."""


class GradientExchange:
    """Averages the gradients of a model's processes in each step. All of them make it, and run steps, together.

    Args:
        model: with the same parameters everywhere; those of the first process are copied to the others.
        optimizer: whose parameters it is about.
        peers: the processes.
        runtime: the device.
        max_norm: of all gradients: their norm is taken.
        per_bucket: each process clips each bucket of its own before the exchange, to its share of `max_norm` by its
            number of elements.
        shards: each process keeps the optimizer's state of some buckets, updates these parameters and sends them.
        is_equal: whether all processes have the values of the first one already.

    Attributes:
        clips_before: whether gradients are clipped before they are exchanged.

    Raises:
        InputError: processes have other parameters, or sparse gradients.
        PeerLostError: here and in each step: another process has ended.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        peers: Peers,
        runtime: DeviceRuntime,
        *,
        max_norm: float | None = None,
        per_bucket: bool = False,
        shards: bool = False,
        is_equal: bool = False,
    ) -> None:
        self._model, self._optimizer, self.peers, self._runtime = model, optimizer, peers, runtime
        self._max_norm, self.clips_before, self.shards = max_norm, per_bucket, shards
        self._averages = peers.averages(runtime.device)
        if self._averages:
            # Processes capture at different steps where their batches have different shapes, and NCCL has them meet to
            # exchange addresses for a capture.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        self._plans: dict[Hashable, BucketPlan] = {}
        self._owners: dict[int, int] | None = {} if shards else None
        self._everyone: list[int] = []
        self._arrived: dict[int, Any] = {}
        self._handed = HandedOver(self._take_over, self._note_arrival, self._place_of)
        self._began: Any = None
        self._step_key: Hashable = None
        self._launched, self._before = 0, list[Tensor]()
        self._has_new_buckets = False
        self._plan: BucketPlan | None = None
        self.peers.check_alike(self._parameters())
        if not is_equal:
            with torch.no_grad():
                self.peers.copy_from_first([*self._parameters(), *model.buffers()])

    def __str__(self) -> str:
        plan = self._plan
        told = f"gradients of {self.peers.size} processes are averaged"
        shares = "; the optimizer's state is shared out" if self.shards else ""
        if plan is None or plan.exposed_us is None:
            return told + shares
        told += f" in {len(plan.buckets)} buckets of up to {plan.limit / 2**20:.3g} MiB while backward goes on: "
        told += f"{plan.exchange_us / 1e3:.1f} ms, of which {plan.exposed_us / 1e3:.1f} behind it, as predicted"
        return told + shares

    @property
    def can_be_captured(self) -> bool:
        """True where the group's backend works in graphs."""
        return self._averages or self._runtime.device.type == CPU

    @property
    def has_begun(self) -> bool:
        """True where gradients of this step are exchanged already."""
        return self._launched > 0

    @property
    def is_settled(self) -> bool:
        """True where the buckets are those of all later steps, and have been exchanged: NCCL sets up at first use."""
        plan = self._plans.get(self._key())
        return plan is not None and plan.is_timed and plan.runs > 0

    def has_new_buckets(self) -> bool:
        """Say whether there are since the last question: what was captured before does not know them."""
        found, self._has_new_buckets = self._has_new_buckets, False
        return found

    def captures(self, is_ready: bool, is_replayed: bool) -> bool:
        """Say whether this process captures a step now; all of them say how they run it.

        They capture at the same step, or have captured before, since some backends exchange addresses for a capture.

        Args:
            is_ready: whether it may be captured.
            is_replayed: whether it is captured already.
        """
        state = REPLAYED if is_replayed else READY if is_ready and self.is_settled else PLAIN
        self._meet(state)
        return self._are_capturing and state == READY

    def have_captured(self, is_replayed: bool) -> None:
        """Say, where processes have captured, whether this one has a graph."""
        if self._are_capturing:
            self._meet(REPLAYED if is_replayed else PLAIN)

    @property
    def are_plain(self) -> bool:
        """True where no process runs this step as a graph, which has gradients of all parameters in buckets."""
        return PLAIN in self._everyone and REPLAYED not in self._everyone

    @property
    def _are_capturing(self) -> bool:
        return READY in self._everyone and PLAIN not in self._everyone

    def _meet(self, state: int) -> None:
        self._everyone = [each for (each,) in self.peers.told([state])]

    def begin(self) -> None:
        """Begin a step."""
        self._arrived, self._launched, self._step_key = {}, 0, self._key()
        self._plan = self._plans.get(self._step_key)
        if self._plan is not None:
            self._plan.begin()
            if self.shards:
                for parameter in self._of_others(self._plan):
                    self._optimizer.state.pop(parameter, None)
        # Not by their versions: torch's batch norm writes to its statistics without a new one.
        self._before = [buffer.detach().clone() for buffer in self._model.buffers()] if self._plan is None else []

    @contextmanager
    def within(self) -> Iterator[None]:
        """Exchange gradients while a backward runs in it, the one that completes them."""
        parameters = self._parameters()
        with self._handed.of(parameters):
            handles = [
                p.register_post_accumulate_grad_hook(self._collect)  # type: ignore[no-untyped-call]
                for p in parameters
            ]
            self._began = self._mark()
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def finish(self) -> Tensor | None:
        """Exchange what is left; return the norm of all gradients, where they are clipped: by it, or per bucket."""
        is_new = self._plan is None
        plan = self._plan = self._plan or self._planned()
        missing = {id(parameter) for parameter in plan.order if parameter.grad is None}
        if missing and self._runtime.is_capturing():
            raise InputError("a parameter has no gradient in it, and may have one in another process")
        self._launch_ready(plan, is_over=True)
        none = [] if is_new or not self.are_plain else self._missing_everywhere(plan, missing)
        if not self.shards or (self._max_norm is not None and not self.clips_before):
            for bucket in plan.buckets:
                self.peers.wait(bucket.work)
        with torch.no_grad():
            norm = None if self._max_norm is None else self._norm(plan)
        for parameter in (*none, *(self._of_others(plan) if self.shards else ())):
            parameter.grad = None
        return norm

    def gather(self) -> ParameterGather:
        """Return what updates, and gathers, the parameters of a step behind `finish`, where the state is shared out."""
        return ParameterGather(self._plans[self._step_key].buckets, self.peers)

    def parts(self) -> list[list[nn.Parameter]]:
        """Return the parameters that this process updates in the next step, in parts, where its buckets are settled."""
        return ParameterGather(self._plans[self._key()].buckets, self.peers).parts

    def updated(self) -> None:
        """End the step, once the optimizer's is queued."""
        plan = self._plan
        assert plan is not None
        with torch.no_grad():
            self.peers.copy_from_first(plan.moving)
        self._launched = 0
        plan.begin()
        plan.runs += 1
        if plan.runs > 1 and not plan.is_timed:
            self._choose(plan)

    def whole_state(self) -> dict[str, Any] | None:
        """Return the optimizer's state of all processes on the host, in the first one; None in the others.

        It is what `optimizer.state_dict()` returns where nothing is shared out.
        """
        own = self._optimizer.state_dict()
        if not self.shards:
            return own if self.peers.rank == 0 else None
        of_all = self.peers.objects(tree_map_only(Tensor, Tensor.cpu, own["state"]))
        if of_all is None:
            return None
        states = {key: state for part in of_all for key, state in part.items()}
        return {**own, "state": dict(sorted(states.items()))}

    def _parameters(self) -> list[nn.Parameter]:
        groups = self._optimizer.param_groups
        return list({id(p): p for group in groups for p in group["params"] if p.requires_grad}.values())

    def _key(self) -> Hashable:
        """Return what a plan of buckets is for: parameters that are trained, and modes, by which buffers change."""
        modes = tuple(module.training for module in self._model.modules())
        return modes, tuple(id(parameter) for parameter in self._parameters())

    def _mark(self) -> Any:
        """Return a mark of this moment in a step whose gradients are timed."""
        is_timed = self._plan is not None and not self._plan.is_timed
        return self._runtime.mark() if is_timed and not self._runtime.is_capturing() else None

    def _collect(self, parameter: nn.Parameter) -> None:
        """Take a parameter whose gradient has come, and exchange the buckets that are complete."""
        if parameter.grad is None:  # a compiled graph has said that there is none
            return
        self._note_arrival(parameter)
        is_whole = self._handed.has_come(parameter)
        gradient, plan, shape = parameter.grad, self._plan, tuple(parameter.shape)
        if gradient is not None and gradient.layout is not torch.strided:
            raise InputError("gradients are sparse: several processes exchange dense ones, so use sparse=False")
        if plan is None:
            return
        bucket = plan.bucket_of.get(id(parameter))
        if bucket is not None and id(parameter) in bucket.taken and (is_whole or not bucket.is_sent):
            view = bucket.view_of(parameter)
            if not is_whole and gradient is not None:  # as in earlier steps it was
                view.copy_(gradient)
            parameter.grad = view
            return
        if bucket is None:
            if all(parameter is not each for each in plan.silent):
                raise InputError(
                    f"a parameter of shape {shape} was frozen when the step began: set requires_grad between steps"
                )
            if not self.are_plain:
                raise InputError(
                    f"a parameter of shape {shape} has a gradient, and had none in any process before, while others "
                    "replay graphs of a step: use capture=False, or begin with steps that use all parameters"
                )
            return
        if bucket.is_sent:
            raise InputError(
                f"the gradient of a parameter of shape {shape} comes in parts, as in reentrant checkpoints, or has a "
                "part that it had not in earlier steps, and its first part is sent already: checkpoint with "
                "use_reentrant=False, and compute losses that change from step to step in another training_step"
            )
        bucket.waits_for.discard(id(parameter))
        self._launch_ready(plan)

    def _note_arrival(self, parameter: Tensor) -> None:
        self._arrived.setdefault(id(parameter), self._mark())

    def _take_over(self, ready: Ready) -> list[Tensor | None]:
        """Take gradients over that regions have made, and exchange the buckets that are complete by them."""
        found = into_buckets(ready, self._open_bucket_of)
        if self._plan is not None:
            self._launch_ready(self._plan)
        return found

    def _place_of(self, parameter: nn.Parameter) -> Tensor | None:
        bucket = self._open_bucket_of(parameter)
        return None if bucket is None else bucket.view_of(parameter)

    def _open_bucket_of(self, parameter: Tensor) -> Bucket | None:
        bucket = self._plan.bucket_of.get(id(parameter)) if self._plan else None
        return bucket if bucket and not bucket.is_sent else None

    def _launch_ready(self, plan: BucketPlan, *, is_over: bool = False) -> None:
        while self._launched < len(plan.buckets) and (is_over or not plan.buckets[self._launched].waits_for):
            self._launch(plan)

    def _launch(self, plan: BucketPlan) -> None:
        """Begin the exchange of the next bucket."""
        bucket = plan.buckets[self._launched]
        self._launched += 1
        bucket.is_sent = True
        with torch.no_grad():
            flat = bucket.fill()
            if self.clips_before:
                bucket.own_norm = torch.linalg.vector_norm(flat, dtype=torch.float32)
                share = sqrt(bucket.elements / sum(each.elements for each in plan.buckets))
                flat.mul_(coefficient(share * (self._max_norm or 0.0), bucket.own_norm).to(flat.dtype))
            if not self._averages:
                flat.div_(self.peers.size)
        if self.shards:
            bucket.work = self.peers.reduce(flat, bucket.owner, averages=self._averages)
        else:
            bucket.work = self.peers.all_reduce(flat, averages=self._averages)

    def _norm(self, plan: BucketPlan) -> Tensor:
        """Return the norm of all gradients; where they are clipped already, of this process's own before that."""
        if self.clips_before:
            norms = [bucket.own_norm for bucket in plan.buckets if bucket.own_norm is not None]
        else:
            kept = [b.flat for b in plan.buckets if b.flat is not None and self._is_own(b)]
            norms = list(torch._foreach_norm(kept, 2, dtype=torch.float32)) if kept else []
        norms = norms or [torch.zeros((), device=self._runtime.device)]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        if self.shards and not self.clips_before:
            squared = norm.square()
            self.peers.wait(self.peers.all_reduce(squared, averages=False))
            norm = squared.sqrt()
        return norm

    def _is_own(self, bucket: Bucket) -> bool:
        return not self.shards or bucket.owner == self.peers.rank

    def _of_others(self, plan: BucketPlan) -> list[nn.Parameter]:
        return [p for bucket in plan.buckets if not self._is_own(bucket) for p in bucket.parameters]

    def _missing_everywhere(self, plan: BucketPlan, missing: set[int]) -> list[nn.Parameter]:
        """Return parameters without a gradient in any process, and exchange those that have their first one."""
        late = [int(parameter.grad is not None) for parameter in plan.silent]
        of_all = self.peers.told([*(int(id(parameter) in missing) for parameter in plan.order), *late])
        said = list(zip(*of_all, strict=True))
        none = [parameter for parameter, own in zip(plan.order, said, strict=False) if all(own)]
        new = [p for p, own in zip(plan.silent, said[len(plan.order) :], strict=True) if any(own)]
        if new:
            plan.add(new, self.peers.size)
            self._has_new_buckets = True
            self._launch_ready(plan, is_over=True)
        return none

    def _planned(self) -> BucketPlan:
        """Return buckets in the order in which the first process has got its gradients."""
        parameters, buffers = self._parameters(), list(self._model.buffers())
        written = [int(not torch.equal(buffer, before)) for buffer, before in zip(buffers, self._before, strict=True)]
        of_all = self.peers.told([*(int(p.grad is not None) for p in parameters), *written])
        is_used = [any(each) for each in zip(*of_all, strict=True)]
        places = {id(parameter): number for number, parameter in enumerate(parameters)}
        came = [places[key] for key in self._arrived]
        order = self.peers.told_by_first([*came, *(set(range(len(parameters))) - set(came))])
        used = [parameters[number] for number in order if is_used[number]]
        if not used:
            raise InputError("no parameter has a gradient: the loss depends on none that the optimizer moves")
        silent = [p for p, is_one in zip(parameters, is_used, strict=False) if not is_one]
        moving = [b for b, is_one in zip(buffers, is_used[len(parameters) :], strict=True) if is_one]
        plan = self._plans[self._step_key] = BucketPlan(used, silent, moving, self._owners)
        arrivals = [self._arrival(parameter) for parameter in used]
        limit = min(FIRST_LIMIT, sum(each.size for each in arrivals) // (PARTS * self.peers.size))
        plan.divide(arrivals, limit if self.shards else FIRST_LIMIT, self.peers.size)
        return plan

    def _arrival(self, parameter: nn.Parameter) -> Arrival:
        mark = self._arrived.get(id(parameter))
        return arrival(parameter, 0.0 if mark is None else self._runtime.elapsed_us(self._began, mark))

    def _choose(self, plan: BucketPlan) -> None:
        """Choose the size of buckets by the time of each gradient, and of exchanges, as the first process measured.

        Where the optimizer's state is shared out, it lies where the first buckets have it, and they stay.
        """
        arrivals = [self._arrival(parameter) for parameter in plan.order]
        small, large = PROBES
        small_us, large_us = (self.peers.exchange_us(size, self._runtime) for size in PROBES)
        time = ExchangeTime.fitted(small, small_us, large, large_us)
        limit = plan.limit if self.shards else chosen_limit(arrivals, time)
        whole_us, exposed = time.of(sum(each.size for each in arrivals)), exposed_us(arrivals, limit, time)
        limit, whole_ns, exposed_ns = self.peers.told_by_first([limit, int(whole_us * 1e3), int(exposed * 1e3)])
        plan.exchange_us, plan.exposed_us = whole_ns / 1e3, exposed_ns / 1e3
        if limit != plan.limit:
            plan.divide(arrivals, limit, self.peers.size)
