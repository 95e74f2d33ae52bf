"""The worker process: the context of `main_fun`, its process, saves, logs."""
