"""Attention of CUDA's libraries: the storage format of the mask of dropped weights, by kernel."""

LIBRARY = {"cuda_flash_attention": "flash", "cudnn_attention": "cudnn", "cuda_efficient_attention": "efficient"}
