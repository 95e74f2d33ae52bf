"""State of a cluster at the driver: what is known of it, what each event leads to."""
