"""Rows as columns: schema, chunks, batches and the operations on them."""
