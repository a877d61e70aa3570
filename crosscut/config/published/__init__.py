"""Published models: presets with their sizes, and conversion of the config files of each model family."""
