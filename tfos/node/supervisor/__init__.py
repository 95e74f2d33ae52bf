"""The supervisor process of a node: children, heartbeats, logs, restarts, TensorBoard."""
