"""Protocol fields that this server does not support. Each field is listed with the values that are accepted because
they have no effect, and with the reason for refusing all other values.
"""

from collections.abc import Mapping, Sequence

Known = Mapping[str, tuple[Sequence[object], str]]

LABELS = (
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
)  # fmt: skip
"""Fields for the client's own records and billing, which do not affect the answer."""

NO_TOOLS = "Tools are not supported. Describe them in the text."
TEXT_ONLY = "Only text is supported."

COMPLETION_ONLY_AS: Known = {
    "suffix": (("",), "Text is generated only after a prompt."),
}

ONLY_AS: Known = {
    "service_tier": (("auto", "default"), "There is only one tier."),
    "tools": (([],), NO_TOOLS),
    "tool_choice": (("none", "auto"), NO_TOOLS),
    "parallel_tool_calls": ((True, False), NO_TOOLS),
    "functions": (([],), NO_TOOLS),
    "function_call": (("none", "auto"), NO_TOOLS),
    "response_format": (({"type": "text"},), "Output formats are not enforced. Ask for the format in the text."),
    "modalities": ((["text"],), TEXT_ONLY),
    "audio": ((), TEXT_ONLY),
    "prediction": ((), "Predicted outputs are not supported."),
    "reasoning_effort": (("none",), "The chat template controls reasoning. Ask in the text."),
    "verbosity": (("medium",), "Ask for a length in the text."),
    "web_search_options": ((), "The server has no access to the web."),
    "store": ((False,), "The server stores nothing."),
    "moderation": ((), "The server does not moderate requests or answers."),
}
"""Fields of both protocols. Completions accept the values without effect of fields that OpenAI has only for chats,
because some clients send the same fields to both.
"""

MESSAGE_ONLY_AS: Known = {
    "tool_calls": (([],), NO_TOOLS),
    "function_call": ((), NO_TOOLS),
    "tool_call_id": ((), NO_TOOLS),
    "audio": ((), TEXT_ONLY),
    "refusal": ((), "Put it into `content`."),
    "annotations": (([],), TEXT_ONLY),
}
