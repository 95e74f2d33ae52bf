"""Worker's side of a feed: the channel, the queue of chunks, batches, DataFeed, inference results.

Public names: `channel.FeedChannel`, `batch_reader.BatchReader`, `data_feed.DataFeed`.
One condition, `state.FeedState.changed`, guards all feeds of a worker; no other lock is taken with
it. Queues and results (feed_queue, epoch_rows, results) are pure: their caller holds it.
"""
