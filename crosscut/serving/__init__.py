"""Web server for a model, with OpenAI's protocols (completions, chat, embeddings) and an interactive page.

docs/serving.md lists the fields that clients can set.
"""

from crosscut.serving.server import ServerOptions, serve

__all__ = ["ServerOptions", "serve"]
