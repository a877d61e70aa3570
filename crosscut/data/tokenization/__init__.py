"""Conversion between text and token ids: the tokenizer, its fast encoder, and encoding on all cores."""
