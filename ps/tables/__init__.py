"""Sparse tables: hash index, segments, row kernels, admission, eviction, quota, routing of ids.

`Table` is one server's share of a table; `Router` prepares a worker's ids for it.

Arrays, by the names that all modules here use; T is the table's dtype (float32 or float64):

    name            shape               dtype    what
    ids, row_ids    [n], [num_rows]     int64    ids as bits; of uint64 tables the same 64 bits
    unique          [num_unique]        int64    distinct ids; after `arrange` sorted by part
    inverse         [n]                 int32    index in `unique` of each given id
    parts           [4096]              int32    part of each virtual bucket, ascending
    ends            [num_parts]         int64    end of each part in a sorted array of ids
    rows            [n]                 int64    row number of each id; below 0: no row
    slab            [capacity, width]   T        rows: dim values, then the slots of the rule
    values, out     [n, dim]            T        values of rows
    grads           [n, dim]            T        gradients, one row per id
    versions        [num_rows]          int64    push that changed the row last
    slots           [power of 2]        uint64   hash index: 32 bits of hash, 32 bits of row + 1
    sketch, counts  [4, power of 2]     uint16   admission: how often ids were pushed
    victims         [n]                 int64    row numbers to evict, ascending, each once

All are C-contiguous. `n` differs from call to call; `capacity` >= `num_rows`.

Lock order: segments of a table in ascending number, then the quota's lock.
"""
