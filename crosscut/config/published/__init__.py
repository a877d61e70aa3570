"""Published models: their shapes as presets, and what the config files in their folders say, family by family."""
