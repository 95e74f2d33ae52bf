"""`cluster.train` and `cluster.inference`: sources, epochs, the ledger, validation."""
