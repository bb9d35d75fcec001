"""Importing this registers every kernel's rules; implementations load later, by name, where they run."""

from autotuner.kernels.rules import (
    attention,
    contraction,
    conversion,
    cublaslt,
    dropout,
    elementwise,
    fused,
    rows,
    stacked,
)

__all__ = ["attention", "contraction", "conversion", "cublaslt", "dropout", "elementwise", "fused", "rows", "stacked"]
