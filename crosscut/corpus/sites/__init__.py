"""Find the boilerplate that the pages of a site share, by its repetition, and cut it from the pages."""
