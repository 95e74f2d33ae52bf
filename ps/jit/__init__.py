"""Compilation of kernels: numba's cache directory and the intrinsics that kernels use."""
