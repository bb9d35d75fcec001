"""Adam's steps in one pass, as they are captured: torch's values, and torch's own steps where that is not known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import autotuner
from autotuner.kernels.triton import adam
from autotuner.kernels.triton.adam_program import moved_chunk
from autotuner.runtime.one_pass_updates import OnePassUpdates, is_known
from tests.kernels.calls import interpreted

WIDTH, STEPS, WARM = 48, 7, 2
BFLOAT16 = 1 / 128
"""A step of bfloat16, to which Triton's interpreter rounds towards zero."""


@pytest.mark.slow
def test_programs_move_parameters_of_any_form_as_torch_does() -> None:
    found = interpreted("tests.kernels.interpreted_adam")
    assert len(found) == 6
    for name, errors in found.items():
        steps = 3 if "clipped" in name else 1  # a gradient is rounded first, and its square is off by two
        assert max(errors.values()) < (steps * BFLOAT16 if "bfloat16" in name else 2e-7), name


@pytest.mark.slow
@pytest.mark.parametrize("is_scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_whole_chunks_are_read_and_written_in_vectors_of_16_bytes(dtype: torch.dtype, is_scaled: bool) -> None:
    types = dict.fromkeys(("beta_one", "rest_one", "beta_two", "rest_two", "epsilon", "decay"), "fp32")
    types |= {"table": "*i64", "places": "*i32"} | dict.fromkeys(("factors", "rates", "corrections"), "*fp32")
    constants = {
        "TYPE": adam.TYPES[dtype], "SCALED": is_scaled, "DECOUPLED": True, "ALIGNED": True, "CHUNK": adam.CHUNK,
    }  # fmt: skip
    source = ASTSource(moved_chunk, types | dict.fromkeys(constants, "constexpr"), constants)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": adam.WARPS}).asm["ptx"]
    vectors = adam.CHUNK * dtype.itemsize // (16 * 32 * adam.WARPS)
    assert (text.count("ld.global.v4"), text.count("st.global.v4")) == (4 * vectors, 3 * vectors)


def net(dtype: torch.dtype = torch.float32, device: str = "cuda") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)).to(device, dtype)


def loss_of(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(batch).float().square().mean()
    return loss


def test_a_processor_s_steps_are_the_optimizer_s_own() -> None:
    model = net(device="cpu")
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    torch.autograd.backward(loss_of(model, torch.ones(2, 33)))
    updates = OnePassUpdates(optimizer, torch.device("cpu"))
    updates.step()
    assert not updates.is_in_use
    assert all(float(state["step"]) == 1 for state in optimizer.state.values())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": [first], "weight_decay": 0.0}, {"params": others, "lr": 3e-3, "betas": (0.8, 0.95)}]


KNOWN: dict[str, Callable[[nn.Module], Optimizer]] = {
    "fused": lambda model: AdamW(model.parameters(), lr=1e-2, fused=True),
    "two groups": lambda model: AdamW(groups(model), lr=1e-2, fused=True),
    "decay in the gradient": lambda model: Adam(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True),
    "torch's default": lambda model: AdamW(model.parameters(), lr=1e-2),
}
LEFT: dict[str, Callable[[nn.Module], Optimizer]] = {
    "amsgrad": lambda model: AdamW(model.parameters(), lr=1e-2, amsgrad=True, fused=True),
    "maximize": lambda model: AdamW(model.parameters(), lr=1e-2, maximize=True, fused=True),
    "another optimizer": lambda model: NAdam(model.parameters(), lr=1e-2, capturable=True),
    "without moments": lambda model: SGD(model.parameters(), lr=1e-2, fused=True),
}


def trained(
    make: Callable[[nn.Module], Optimizer], dtype: torch.dtype, folder: Path, *, captures: bool
) -> tuple[nn.Module, Optimizer]:
    """Return a model behind some steps, and its optimizer."""
    torch._dynamo.reset()
    model = net(dtype)
    optimizer = make(model)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    step = autotuner.training_step(
        model, optimizer, loss_of, max_norm=0.5, capture=captures, database=folder / "a.sqlite"
    )
    for number in range(STEPS):
        torch.manual_seed(number)
        step(torch.randn(4, 33, device="cuda", dtype=dtype))
        schedule.step()
    assert step.replays == (STEPS - WARM if captures else 0), str(step)
    return model, optimizer


@pytest.mark.parametrize("name", [*KNOWN, *LEFT])
def test_steps_that_do_what_the_class_says_are_known(name: str) -> None:
    optimizer: Any = (KNOWN | LEFT)[name](net(device="cpu"))
    assert is_known(optimizer) == (name in KNOWN)
    LambdaLR(optimizer, lambda step: 1 / (1 + step))
    assert is_known(optimizer) == (name in KNOWN)
    hook = register_optimizer_step_post_hook(lambda *_: None)
    assert not is_known(optimizer)
    hook.remove()
    own = optimizer.step
    optimizer.step = lambda: own()
    assert not is_known(optimizer)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*KNOWN, *LEFT])
def test_captured_steps_move_parameters_and_state_as_plain_ones(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, step, used = (KNOWN | LEFT)[name], OnePassUpdates.step, list[bool]()

    def noted(updates: OnePassUpdates, norm: Tensor | None) -> None:
        step(updates, norm)
        used.append(updates.is_in_use)

    monkeypatch.setattr(OnePassUpdates, "step", noted)
    mine, optimizer = trained(make, dtype, tmp_path, captures=True)
    plain, other = trained(make, dtype, tmp_path, captures=False)
    assert used == [name in KNOWN and (dtype == torch.float32 or name != "torch's default")]
    tolerance: dict[str, Any] = dict.fromkeys(("rtol", "atol"), 1e-5 if dtype == torch.float32 else 2e-2)
    for own, wanted in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, **tolerance)
        for key, value in other.state.get(wanted, {}).items():  # asking for a state would make one
            if isinstance(value, Tensor):
                torch.testing.assert_close(optimizer.state[own][key], value, **tolerance, check_device=False)
    assert len(optimizer.state_dict()["state"]) == len(other.state_dict()["state"])
