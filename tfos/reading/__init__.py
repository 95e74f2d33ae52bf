"""`ctx.read`: files that workers read themselves, row counts, resuming (also of fed epochs)."""
