"""Implementations by NVIDIA's cuDNN, through its own front end."""
