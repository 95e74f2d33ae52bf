"""Byte streams below the frames: sockets, TLS, AES-GMAC records, shared memory, in-process pipes.

Public names: `stream.Stream` (the protocol that all of them implement), `negotiate.upgraded`.
"""
