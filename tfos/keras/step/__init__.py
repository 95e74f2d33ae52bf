"""One training step on the parameter server: gradients out, parameters in."""
