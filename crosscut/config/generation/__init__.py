"""Options of generated texts."""
