"""Chat templates, which are programs of a model's author, rendered in a process of their own."""
