"""Models that are trained with whole steps, beside twins that a plain loop trains."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotuner.runtime.devices import CudaRuntime
from autotuner.runtime.whole_step import WholeStep
from tests.runtime.made_up_device import MadeUpDevice, kept


class Recorder(MadeUpDevice):
    """A device whose captures put back model and optimizer, and not what is drawn on the host.

    Attributes:
        gathered: what it was asked to gather, call by call.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._model, self._optimizer = model, optimizer
        self.gathered: list[list[Tensor]] = []

    def gather(self, tensors: Iterable[Tensor]) -> None:
        self.gathered.append(list(tensors))

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        tensors += [
            value for state in self._optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
        ]
        with kept(tensors):
            yield


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def loss_of(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def batches(count: int, rows: int = 6) -> list[dict[str, Tensor]]:
    """Return batches on the CPU."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(rows, 4, generator=generator), "y": torch.randint(0, 3, (rows,), generator=generator)}
        for _ in range(count)
    ]


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.05, "fused": True, **options})


class Pair:
    """A model that is trained with whole steps, and its twin, by a plain loop."""

    def __init__(
        self,
        make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        loss: Callable[[Any, Any], Tensor] = loss_of,
        model: nn.Module | None = None,
        device: str = "cpu",
        compiled: Callable[[Callable[[Any], Tensor]], Callable[[Any], Tensor]] = lambda objective: objective,
        **options: Any,
    ) -> None:
        self.loss, self.max_norm = loss, options.get("max_norm")
        self.ours = (model or net()).to(device)
        self.theirs = copy.deepcopy(self.ours)
        self.own, self.other = make(self.ours), make(self.theirs)
        self.recorder = Recorder(self.ours, self.own)
        self.step = WholeStep(
            self.ours,
            self.own,
            compiled(lambda batch: loss(self.ours, batch)),
            recorder=self.recorder if device == "cpu" else CudaRuntime(torch.device(device)),
            **options,
        )

    def train_all(self, batches: Iterable[Any], tolerance: float | None = None) -> None:
        for batch in batches:
            self.train(batch, tolerance)

    def train(self, batch: Any, tolerance: float | None = None) -> None:
        """Run a step with both, and compare loss and parameters."""
        torch.testing.assert_close(self.step(batch), self.plain(batch), rtol=tolerance, atol=tolerance)
        for one, other in zip(self.ours.parameters(), self.theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)

    def plain(self, batch: Any) -> Tensor:
        self.other.zero_grad()
        device = next(self.theirs.parameters()).device
        moved = {name: value.to(device) for name, value in batch.items()} if isinstance(batch, dict) else batch
        loss = self.loss(self.theirs, moved)
        torch.autograd.backward(loss)
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.theirs.parameters(), self.max_norm)
        self.other.step()
        return loss.detach()
