"""What a running cluster reports: status, stragglers, Prometheus page."""
