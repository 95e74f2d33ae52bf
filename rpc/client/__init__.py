"""RPC client: connecting to a process, and calls that wait for a reply.

Public names: `connection.connect`, `connection.Connection`, `connection.wait_any`.
Lock order of one connection: `_beginning`, then `driving`.
"""
