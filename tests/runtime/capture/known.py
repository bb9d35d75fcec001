"""Knowledge of regions without measuring: plans by made-up times, of the kernels that need no compiler."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autotuner.api.backend import COMPILED, compiler_of, rewrite
from autotuner.errors import InfeasibleError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model
from autotuner.ir.records import digest
from autotuner.plan.configuration import Configuration, load_configuration, save_configuration
from autotuner.runtime.coverage import CompiledGraph
from autotuner.runtime.region import TunedRegion
from autotuner.space import SpaceFile, build_space
from autotuner.tuner import build_configuration
from tests.made_up import CPU, HERE, UNEXPLAINED, times
from tests.runtime.plans import configuration

_OF_TORCH = [name for name in CPU.kernels if name.startswith("torch")]


def _of(layouts: dict[str, str]) -> SpaceFile:
    kernels = {name: {"layouts": which} for name, which in layouts.items()}
    return SpaceFile.model_validate(CPU.model_dump() | {"kernels": kernels})


FEW = _of({name: "all" if name == "torch_matmul" else "declared" for name in _OF_TORCH})
MORE = _of(dict.fromkeys(_OF_TORCH, "all") | {"inductor": "declared"})


_PLANNED: dict[str, Configuration] = {}
_PLANS = Path(os.environ["HOME"], "plans")
"""Plans of all processes of a run: a plan takes half a second or more, and reading one some milliseconds."""


def planned(model: Model) -> Configuration:
    """Return a model's plan; equal models have one in all tests."""
    key = digest(model.to_json())
    if key not in _PLANNED:
        path = _PLANS / f"{key}.json"
        if not path.exists():
            _PLANS.mkdir(exist_ok=True)
            save_configuration(_planned_anew(model), path)
        _PLANNED[key] = load_configuration(path)
    return _PLANNED[key]


def _planned_anew(model: Model) -> Configuration:
    try:
        return _planned(model, FEW)
    except InfeasibleError:  # as where a norm runs along two axes, or along another one than the last
        return _planned(model, MORE)


def _planned(model: Model, file: SpaceFile) -> Configuration:
    space = build_space(training_graph(model.graph()), file)
    return build_configuration(model, space, times(space.calls), HERE, {"calls": len(space.calls)}, policy=UNEXPLAINED)


class Known:
    """Knows every model, or none but those that it is given names of."""

    def __init__(self, names: Iterable[str] | None = None) -> None:
        self._names = None if names is None else frozenset(names)
        self.wanted: list[Model] = []

    def find(self, models: Iterable[Model], device_type: str) -> list[Configuration | None]:
        known = [self._names is None or model.name in self._names for model in models]
        return [
            (planned(model) if device_type == "cpu" else configuration(model, device_type=device_type))
            if is_known
            else None
            for model, is_known in zip(models, known, strict=True)
        ]

    def want(self, models: Iterable[Model], device_type: str) -> str:  # noqa: ARG002
        self.wanted += models
        return "somebody tunes them"


class Compilation:
    """A compiled model, and what was found in it."""

    def __init__(
        self,
        model: nn.Module,
        knowledge: Known | None = None,
        compiler: str = "eager",
        in_place: bool = False,
        **given: Any,
    ) -> None:
        self.regions: list[TunedRegion] = []
        self._in_place = in_place
        self._knowledge, self._begun = knowledge or Known(), len(COMPILED)
        self._compiler = compiler_of(compiler)
        torch._dynamo.reset()
        self.model = torch.compile(model, backend=self._compile, dynamic=False, **given)

    @property
    def compiled(self) -> list[CompiledGraph]:
        return COMPILED[self._begun :]

    def _compile(self, module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        made = rewrite(module, inputs, self._knowledge, in_place=self._in_place)
        self.regions += [each for each in made if isinstance(each, TunedRegion)]
        found: Callable[..., Any] = self._compiler(module, inputs)
        return found


def gradients(model: nn.Module, loss: Callable[[Any], Tensor], called: Any = None) -> dict[str, Tensor]:
    """Return the loss of a model's call, and the gradients of all parameters that get one."""
    model.zero_grad()
    value = loss(model if called is None else called)
    value.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": value.detach()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Check that gradients are equal, each within a share of the largest one's norm."""
    assert found.keys() == wanted.keys()
    largest = max(float(each.norm()) for each in wanted.values())
    off = {name: float((found[name] - wanted[name]).norm()) / largest for name in wanted}
    assert max(off.values()) <= tolerance, max(off, key=off.__getitem__)


def assert_is_slope(loss: Callable[[], Tensor], weight: Tensor) -> None:
    """Check a weight's gradient against how the loss changes with it, at the masks that a seed gives the loss."""

    def at_seed() -> Tensor:
        torch.manual_seed(5)
        return loss()

    weight.grad = None
    at_seed().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    step = 1e-5
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=weight.dtype)
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * step * direction)
        ends.append(float(at_seed().detach()))
        with torch.no_grad():
            weight.sub_(sign * step * direction)
    assert float((weight.grad * direction).sum()) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)
