"""TFRecord files and tf.Example records without TensorFlow."""
