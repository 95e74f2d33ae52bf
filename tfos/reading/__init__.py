"""`ctx.read`: files that workers read themselves, row counts; resuming, of fed epochs too."""
