"""One node of a cluster: the Spark task that starts it, its processes, its directories."""
