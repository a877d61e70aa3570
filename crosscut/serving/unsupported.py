"""Protocol fields that this server does not support: the values that ask for nothing, and why no other is taken."""

from collections.abc import Mapping, Sequence

Known = Mapping[str, tuple[Sequence[object], str]]

LABELS = (
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
)  # fmt: skip
"""Fields for the caller's books and purse, which ask for nothing that an answer shows."""

NO_TOOLS = "Tools are not supported: describe them in a message."
TEXT_ONLY = "Only text is read and written here."

COMPLETION_ONLY_AS: Known = {
    "suffix": (("",), "Text is only written after a prompt."),
}

CHAT_ONLY_AS: Known = {
    "tools": (([],), NO_TOOLS),
    "tool_choice": (("none", "auto"), NO_TOOLS),
    "parallel_tool_calls": ((True, False), NO_TOOLS),
    "functions": (([],), NO_TOOLS),
    "function_call": (("none", "auto"), NO_TOOLS),
    "response_format": (({"type": "text"},), "Forms are not enforced: ask for them in a message."),
    "modalities": ((["text"],), TEXT_ONLY),
    "audio": ((), TEXT_ONLY),
    "prediction": ((), "Predicted outputs are not supported."),
    "reasoning_effort": (("none",), "How long a model thinks is up to its template: ask in a message."),
    "verbosity": (("medium",), "Ask for a length in a message."),
    "web_search_options": ((), "The server does not reach the web."),
    "store": ((False,), "Nothing is stored here."),
    "moderation": ((), "What is asked and answered is not judged here."),
}

BOTH_ONLY_AS: Known = {
    "service_tier": (("auto", "default"), "There is one tier."),
}

MESSAGE_ONLY_AS: Known = {
    "tool_calls": (([],), NO_TOOLS),
    "function_call": ((), NO_TOOLS),
    "tool_call_id": ((), NO_TOOLS),
    "audio": ((), TEXT_ONLY),
    "refusal": ((), "Put it into `content`."),
    "annotations": (([],), TEXT_ONLY),
}
