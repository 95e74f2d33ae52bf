"""The executor's side of `tfos.map_train`: the slot's task, its process, its trainer."""
