"""Where libraries that are called beside torch queue their work."""

import torch


def current_stream(device: torch.device) -> int:
    """Return the handle of torch's current stream on a CUDA device."""
    return int(torch.cuda.current_stream(device).cuda_stream)
