"""Read emails: `mime` splits a message into its parts, and `messages` takes their texts."""

from crosscut.corpus.readers.mail.messages import read_mail

__all__ = ["read_mail"]
