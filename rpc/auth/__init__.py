"""Authentication of a connection.

The mutual challenge-response handshake and certificates for TLS.
"""
