"""Rows sorted by the hash of their ids: the order, sorting and merging them, searching them.

Rows that leave the servers (exports, the index that serves them) have one order, so that two of
them are merged or compared in one pass, and an id is found in one bucket of a directory.

Arrays, by the names that all modules here use; T is the table's dtype (float32 or float64):

    name            shape               dtype    what
    ids             [n]                 int64    ids as bits; of uint64 tables the same 64 bits
    rows            [n, dim]            T        values, without slots
    removed         [n]                 bool     the id has no row any more; then rows[i] is zeros
    starts          [2^k + 1]           uint32   position of the first id of each bucket of hashes
"""
