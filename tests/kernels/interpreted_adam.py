"""Prints, as JSON, what Adam's steps by Triton's programs differ by, which its interpreter runs on the CPU.

`TRITON_INTERPRET=1` has to be set before Triton is imported. Parameters of several sizes, of more than one chunk, of
another order in memory, and at addresses that no vector begins at, take three steps each; each step is compared with
torch's own from the same values. An error is the largest, over the largest value.

    python -m tests.kernels.interpreted_adam
"""

import json

import torch
from torch import Tensor

from autotuner.kernels.triton import adam
from autotuner.kernels.triton.adam import AdamTables, Moved, Numbers, chunks

STEPS, RATE, FACTOR = 3, 1e-2, 0.3
CASES = {
    "AdamW": Numbers((0.9, 0.999), 1e-8, 1e-2, is_decoupled=True),
    "Adam, clipped": Numbers((0.9, 0.95), 1e-6, 1e-1, is_decoupled=False),
    "AdamW without decay and momentum": Numbers((0.0, 0.99), 1e-8, 0.0, is_decoupled=True),
}

SCALED = "Adam, clipped"


def parameters(dtype: torch.dtype) -> list[Tensor]:
    return [
        torch.randn(7).to(dtype), torch.randn(11, 30).to(dtype), torch.randn(12, 20).to(dtype).t(),
        torch.randn(65).to(dtype)[1:], torch.randn(1, 1, 3).to(dtype),
    ]  # fmt: skip


def errors(numbers: Numbers, dtype: torch.dtype, is_scaled: bool) -> dict[str, float]:
    torch.manual_seed(0)
    trained = [each.requires_grad_() for each in parameters(dtype)]
    kind = torch.optim.AdamW if numbers.is_decoupled else torch.optim.Adam
    optimizer = kind(trained, lr=RATE, betas=numbers.betas, eps=numbers.epsilon, weight_decay=numbers.decay, fused=True)
    own = [each.detach().clone(memory_format=torch.preserve_format) for each in trained]
    worst = {"values": 0.0, "first": 0.0, "second": 0.0}
    for step in range(STEPS):
        given = [torch.randn(each.shape).to(dtype).as_strided(each.shape, each.stride()) for each in trained]
        for each, gradient in zip(trained, given, strict=True):
            each.grad = gradient * FACTOR if is_scaled else gradient
        before = [{name: value.clone() for name, value in optimizer.state[each].items()} for each in trained]
        optimizer.step()
        moved = []
        for value, gradient, state in zip(own, given, before, strict=True):
            state = state or {
                "exp_avg": torch.zeros_like(value), "exp_avg_sq": torch.zeros_like(value), "step": torch.zeros(())
            }  # fmt: skip
            moved.append(Moved(value, gradient, state["exp_avg"], state["exp_avg_sq"], state["step"]))
        tables = AdamTables(len(moved), sum(chunks(each.value.numel()) for each in moved), torch.device("cpu"))
        assert tables.add(moved, torch.tensor(RATE), numbers)
        tables.write()
        tables.launch(torch.tensor(FACTOR) if is_scaled else None)
        for each, one in zip(trained, moved, strict=True):
            state = optimizer.state[each]
            pairs = {"values": (one.value, each), "first": (one.first, state["exp_avg"]),
                     "second": (one.second, state["exp_avg_sq"])}  # fmt: skip
            for name, (mine, wanted) in pairs.items():
                error = (mine - wanted.detach()).abs().max() / wanted.detach().abs().max()
                worst[name] = max(worst[name], float(error))
            assert float(one.counter) == step + 1
            one.value.copy_(each.detach())
    return worst


def main() -> None:
    adam.CHUNK = 128
    print(
        json.dumps(
            {
                f"{name}, {dtype}": errors(numbers, dtype, is_scaled=name == SCALED)
                for name, numbers in CASES.items()
                for dtype in (torch.float32, torch.bfloat16)
            }
        )
    )


if __name__ == "__main__":
    main()
