"""Pages of the project as single HTML files."""
