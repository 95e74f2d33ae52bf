"""Text files, one row per line; what text and CSV share.

Public names: `source.TextSource`, `lines.LineLimits`.
"""
