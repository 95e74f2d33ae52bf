"""A worker's side of feeding.

The channel, the feed's queue, batches, DataFeed, inference results.
"""
