"""CSV files: options and source.

Public names: `options.CsvRequest`, `source.CsvSource`.
"""
