"""File formats that workers read themselves."""
