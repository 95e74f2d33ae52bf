"""Messages between feeders and workers, and the sets of rows that they speak of.

Public names: `messages.FeedStatus`, `row_ranges.AcceptedRows`, `row_ranges.RowRanges`.
"""
