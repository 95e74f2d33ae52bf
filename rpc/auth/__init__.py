"""Authentication of a connection: the HMAC handshake, and certificates for TLS.

Public names: `handshake.ClientHandshake`, `handshake.ServerHandshake`, `certificates.tls_context`.
"""
