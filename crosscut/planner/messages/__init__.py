"""Messages of a training step between ranks: their number, their bytes, their time."""
