"""Messages between ranks that own different parameters: the stages of a pipeline, and experts."""
