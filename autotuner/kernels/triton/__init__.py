"""Kernels of this project's own, written in Triton."""
