"""Replacements of lost nodes: how many are left and when they start, and where one begins."""
