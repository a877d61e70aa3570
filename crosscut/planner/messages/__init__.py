"""Number, bytes and time of the messages that ranks exchange in a training step."""
