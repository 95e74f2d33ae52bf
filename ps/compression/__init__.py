"""Compression of pushed gradients: the packed formats and their kernels."""
