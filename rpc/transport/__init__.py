"""Byte streams below the frames.

TCP, Unix sockets, TLS, AES-GMAC, shared memory, an in-process twin.
"""
