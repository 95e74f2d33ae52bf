"""Rows as columns: schema, chunks, batches and the operations on them.

Public names: `schema.Schema`, `chunk.Chunk`, `batch.Batch`.

Shapes of the arrays; n is the number of rows of a chunk or batch:

    kind of column   values                                      offsets
    tensor           dtype[n, *shape]; shape () for scalars      none
    ragged           dtype[items], all rows joined               int64[n + 1], in items
    str, bytes       uint8[bytes] in a chunk, object[n] in a     int64[n + 1], in bytes (chunk only)
                     batch
    batch.Ragged     as ragged                                   as ragged

dtype is one of bool, float16/32/64, (u)int8/16/32/64. Row i of a column with offsets is
`values[offsets[i]:offsets[i + 1]]`; `offsets[0]` is 0. A chunk may store ints in a narrower dtype
than its schema says; batches and rows have the schema's dtype. Arrays may be read-only views.
"""
