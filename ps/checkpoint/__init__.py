"""Checkpoints: format, writer, reader, restore, lease of a directory, fencing of generations."""
