"""Slots: what Spark offers, what a cluster needs, where its nodes go, and the wait for them."""
