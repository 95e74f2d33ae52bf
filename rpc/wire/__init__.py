"""Frames: the byte layout, and how one is sent and received."""
