"""Text files, a row a line."""
