"""Exchange with the servers: what a step sends, and the values that come back."""
