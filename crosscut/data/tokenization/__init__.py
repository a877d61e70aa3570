"""Documents to token ids and back: the tokenizer, its fast encoder, and all cores at work."""
