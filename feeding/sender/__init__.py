"""Feed tasks: packing a partition's rows, shuffling, routing and sending chunks to workers.

Public names: `task.FeedTask`, `task.InferenceTask`, `arrow_inference.ArrowInferenceTask`.
One lock, of `connection_pool.POOL`; everything else runs in the thread of a Spark task.
"""
