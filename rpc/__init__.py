"""Direct tensor RPC: authenticated frames over TCP, Unix sockets and an in-process twin."""
