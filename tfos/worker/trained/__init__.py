"""Feeds at the chief: which of their rows the servers' parameters contain."""
