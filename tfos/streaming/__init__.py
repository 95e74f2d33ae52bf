"""Structured Streaming into a cluster."""
