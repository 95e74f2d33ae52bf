"""Statistics of a server, as an immutable snapshot and as a Prometheus page."""
