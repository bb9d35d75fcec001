"""What torch's own allocators hand out while something runs."""

from collections.abc import Callable

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

ALLOCATION = "memory_alloc"


def allocated_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that are allocated at any time while a function runs, beyond what was before it.

    Counted is what the calling thread takes from torch's CPU allocator and gives back, in the sizes that it asks for; a
    library's own memory (oneDNN's scratch) is not. Torch's older profiler reports these events at 2 us a recording,
    the one in `torch.profiler` at 400 us, where each kernel that is measured has one.
    """
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(config)
    try:
        run()
    finally:
        events = _disable_profiler_legacy()
    now = most = 0
    for thread in events:
        for event in thread:
            if event.kind() == ALLOCATION:  # type: ignore[comparison-overlap]  # torch's stub calls a name a number
                now += event.cpu_memory_usage()
                most = max(most, now)
    return most


def allocated_on_cuda_bytes(run: Callable[[], object]) -> int:
    """Return the same of torch's allocator on the current CUDA device."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before
