"""Strings as ids of tables: FarmHash's fingerprint of their bytes, as TensorFlow computes it.

Start at `ids.py`.
"""
