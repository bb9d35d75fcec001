"""Importing this registers every kernel's rules; implementations load later, by name, where they run."""

from autotuner.kernels.rules import (
    attention,
    attention_triton,
    contraction,
    conversion,
    cpp,
    cublaslt,
    dropout,
    elementwise,
    fp8,
    fused,
    in_place,
    packed_attention,
    programs,
    rows,
    stacked,
)

__all__ = [
    "attention",
    "attention_triton",
    "contraction",
    "conversion",
    "cpp",
    "cublaslt",
    "dropout",
    "elementwise",
    "fp8",
    "fused",
    "in_place",
    "packed_attention",
    "programs",
    "rows",
    "stacked",
]
