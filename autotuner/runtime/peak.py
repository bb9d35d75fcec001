"""How many bytes a layer's training step allocates at most."""

from torch import nn

from autotuner.measure.allocations import allocated_bytes, allocated_on_cuda_bytes
from autotuner.runtime.framework import MadeUpCall
from autotuner.runtime.module import TunedModule

STEPS = 2


def peak_bytes(layer: nn.Module, call: MadeUpCall) -> int:
    """Return the most bytes that a training step has allocated at any time beside parameters and inputs.

    Forward, and backward with every gradient; gradients of the step before are dropped first. It is the second step
    that counts where steps differ: a tuned layer allocates its arena in the first, and what it hands out stays
    allocated for the next.

    Args:
        layer: a tuned one or the framework's, compiled or not. A tuned one is given new memory.
        call: what it is called with. On CUDA, memory that only graphs use counts while they are captured.
    """

    def drop() -> None:
        for leaf in (call.x, *layer.parameters()):
            leaf.grad = None

    def step() -> None:
        drop()
        layer(call.x, **call.masks).backward(call.grad_y)

    def steps() -> None:
        for _ in range(STEPS):
            step()

    step()  # what is compiled is compiled here
    if isinstance(layer, TunedModule):
        layer.bind()
    drop()
    found = allocated_on_cuda_bytes(steps) if call.x.is_cuda else allocated_bytes(steps)
    drop()
    return found
