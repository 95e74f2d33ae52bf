"""Server side of rpc.

Listener, authentication of new sockets, one thread per connection, requests.
"""
