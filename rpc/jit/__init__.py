"""Compiled kernels of the other rooms, kept on disk; rpc itself has none and loads no numba."""
