"""What the driver prints: lines, progress, tables."""
