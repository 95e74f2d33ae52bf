"""The manifest: groups, tables, rules, their limits, and how buckets are dealt to servers."""
