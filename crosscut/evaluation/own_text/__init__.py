"""Tasks on a user's own text: the loss of the next token, and the loss of masked tokens."""
