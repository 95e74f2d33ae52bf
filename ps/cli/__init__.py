"""Commands of `python -m ps` and `python -m ps.server`."""
