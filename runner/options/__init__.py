"""Every option of the commands, each declared once."""
