"""Requests and replies between PS clients and servers, and who may send which."""
