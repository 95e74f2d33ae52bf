"""TensorFlow's own strategies: the processes of its servers, their ports, whether they are used."""
