"""Published models: presets with their sizes, and the reading of each family's config files."""
