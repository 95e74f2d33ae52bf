"""Spark as the driver sees it: settings, jobs, pickling, the ends of its executors."""
