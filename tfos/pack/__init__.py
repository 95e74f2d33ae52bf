"""`tfos pack`: the running Python environment as one archive that runs on hosts without a Python.

Packages that cannot be moved are refused before anything is written. The driver's host makes the
archive; executors, containers and pods only unpack it.
"""
