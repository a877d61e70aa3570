"""OpenAI's completions, chat and embeddings protocols: the JSON of requests, answers and refusals."""
