"""What the servers hold: groups, tables, rules, their limits and how they are dealt to servers."""
