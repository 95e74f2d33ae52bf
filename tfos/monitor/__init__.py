"""Monitoring of a running cluster: status, stragglers, Prometheus page."""
