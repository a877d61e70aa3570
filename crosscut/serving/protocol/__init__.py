"""OpenAI's completions and chat protocols: the JSON of requests, answers and refusals."""
