"""A worker's side of the parameter server: pushes, pulls, table lookups, saves."""
