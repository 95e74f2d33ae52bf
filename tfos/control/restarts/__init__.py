"""Ends of nodes: silence, what each end means, the restarts left, where a new attempt begins."""
