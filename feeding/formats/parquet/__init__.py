"""Parquet files: footers, row groups, filters, partitioned directories."""
