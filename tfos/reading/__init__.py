"""`ctx.read`: files that workers read themselves, row counts and resuming."""
