"""File formats that workers read themselves: text, CSV, Parquet, TFRecord.

Public names: `text.source.TextSource`, `csv.source.CsvSource`, `parquet.source.ParquetSource`,
`tfrecord.source.TFRecordSource`; each is a `reading.runs.Source`.
"""
