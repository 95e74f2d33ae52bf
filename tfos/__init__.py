"""tfos: parameter servers on Spark executors for Keras 3."""
