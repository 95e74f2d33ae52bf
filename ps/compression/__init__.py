"""Gradients in fewer bytes: the packed formats and their kernels."""
