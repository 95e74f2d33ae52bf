"""Benchmarks that a user runs on the own machine: `tfos bench NAME`.

One question per module, which starts with question, method, caveats and bars; the plain way that a
user would take instead is in `tfos/bench/reference`. Nothing here is imported by a training.
"""
