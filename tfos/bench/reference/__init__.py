"""What a user would take instead, written the plain way; measured in turns with ours."""
