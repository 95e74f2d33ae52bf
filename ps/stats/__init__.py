"""What a server counts, as a snapshot and as a Prometheus page."""
