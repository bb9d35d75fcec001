"""Kernels in CUDA C++, compiled by NVRTC and launched through CuPy on torch's tensors and streams."""
