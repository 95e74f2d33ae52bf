"""Messages between feed tasks and workers."""
