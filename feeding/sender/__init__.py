"""A feed task's side of feeding: packing, shuffling, routing and sending chunks."""
