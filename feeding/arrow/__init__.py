"""Arrow record batches to chunks and results to Arrow."""
