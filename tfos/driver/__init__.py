"""A cluster's life at the driver: reservation, start, node jobs, final checkpoint, shutdown."""
