"""The saves of a client: one, and those that come periodically beside the training."""
