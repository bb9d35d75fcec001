"""Implementations by NVIDIA's cuBLASLt, through nvmath."""
