"""Sparse tables: hash index, segments, row kernels, admission, eviction, quota, routing of ids."""
