"""Ends of nodes: what each means, the restarts that are left, where a new attempt begins."""
