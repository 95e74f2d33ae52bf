"""Direct reading: workers read files themselves; splits, positions, batches, bad records.

Public names: `reader.DirectReader`, `runs.Source`, `splits.shares`, `positions.Position`.
"""
