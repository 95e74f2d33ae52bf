"""Tables in a checkpoint: the format of their segments, reading them, filling them."""
