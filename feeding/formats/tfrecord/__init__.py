"""TFRecord files and tf.Example records, without TensorFlow.

Public names: `source.TFRecordSource`, `example.Feature`, `framing.RecordReader`,
`framing.RecordWriter`, `from_rows.encode_example`.
"""
