"""Spark as the driver sees it: settings, slots, jobs, pickling."""
