"""Client side of rpc: connecting, the authenticated connection, and calls that wait for a reply."""
