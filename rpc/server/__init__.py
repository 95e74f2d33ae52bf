"""RPC server: the listener, the authentication of new sockets, one thread per connection.

Public names: `listener.Listener`, `request.Call`.
"""
