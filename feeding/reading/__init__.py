"""Direct reading: discovering files, cutting them into splits, positions, bad records."""
