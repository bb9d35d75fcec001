"""Kernels: what exists, what each covers and refuses. Rules are pure; implementations load only where they run."""

from autotuner.kernels.registry import KERNELS, Kernel, Registry

__all__ = ["KERNELS", "Kernel", "Registry"]
