"""Records on their way to workers: chunks, feed channels, routing, the feed task and DataFeed."""
