"""Watching a job: one snapshot and one pair of actions, behind the terminal's door and the page."""
