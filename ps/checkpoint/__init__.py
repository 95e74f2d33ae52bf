"""Checkpoints.

Format, writing, reading, restoring, the lease of a directory, fencing of generations.
"""
