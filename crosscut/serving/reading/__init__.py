"""Read requests in separate processes, which parse the JSON and encode the prompts."""
