"""TensorFlow's own strategies: their server processes and ports, and whether they are used."""
