"""Dense parameters of one server: the shard's buckets, staging for sync, moving averages.

`DenseShard` holds the buckets of a server; `StagingPool` the gradients that wait for a barrier.

Arrays; T is the group's dtype (float32 or float64):

    name              shape               dtype   what
    values            [num_elements]      T       parameters of one bucket, a view of the group's
    slots             [num_elements]      T       one array per slot of the rule, then the average
    gradient, pushed  [num_elements]      T       gradient, or pushed values of a running average
    average           [num_elements]      T       moving average of the values (use_ema)
    scalars           [num_scalars]       T       scalars of one step; see ps.optim.rules.scalars
    staged memory     [bytes]             uint8   one gradient of all buckets, groups aligned to 64

All are 1-d and C-contiguous. A bucket has the manifest's `bucket_bytes` of values, the last one of
a group fewer.

Lock order: none; each bucket has one lock, and a thread holds one at a time.
"""
