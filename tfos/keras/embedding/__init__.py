"""Embeddings whose rows live in tables of the parameter servers: the layer and its rows in a step.

Public: `Embedding` (as `tfos.keras.Embedding`).

    ids ──► keys (int64) ──► distinct keys ──► rows of the table ──► compiled step
                                                 ▲                        │
                                  table (ps) ────┘ ◄── summed gradients ──┘

A layer does not know whether it runs in a cluster: `row_flow` says where a call's rows come from.
"""
