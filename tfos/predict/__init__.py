"""Predictions on columns: a saved model fills columns of DataFrames, without a cluster.

Covers: reading models once per Python process, batches across record batches, Arrow in and out.
Does not: train, or serve tables (tfos.serving).
"""
