"""A model over the web: OpenAI's completions and chat protocol, and a page to play with.

docs/serving.md says what clients can ask for.
"""

from crosscut.serving.server import ServerOptions, serve

__all__ = ["ServerOptions", "serve"]
