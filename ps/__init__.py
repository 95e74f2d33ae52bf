"""The parameter server: sharding, optimizers, consistency, exactly-once pushes, checkpoints."""
