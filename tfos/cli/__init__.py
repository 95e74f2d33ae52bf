"""The command `tfos`."""
