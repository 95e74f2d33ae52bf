"""Python rows to columns."""
