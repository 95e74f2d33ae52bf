"""Feeds at the chief: what of them the servers' parameters contain."""
