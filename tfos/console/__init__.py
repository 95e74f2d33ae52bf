"""The driver's console: output of nodes, progress, tables."""
