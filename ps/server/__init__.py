"""A parameter server process: request handlers, phases, the shard, saving and restoring."""
