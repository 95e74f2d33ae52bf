"""Parquet files: footers, row groups, filters, partitioned directories.

Public names: `plan.ParquetRequest`, `source.ParquetSource`, `footer.ParquetLimits`.
"""
