"""Arrow record batches to chunks, and results of inference to Arrow.

Public names: `packer.ArrowPacker`, `results.arrays_of`, `columns.ColumnReader`.
"""
