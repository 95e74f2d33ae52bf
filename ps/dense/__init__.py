"""Dense parameters of one server: the shard's buckets, staging for sync, moving averages."""
