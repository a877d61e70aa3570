"""What a request asks for, whichever of the two protocols it came in.

Both protocols are OpenAI's. What they know and this server cannot do is refused with a reason, and never ignored: a
client that asks for tools or penalties is to hear that it does not get them.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crosscut.data import Tokenizer
from crosscut.generation import Sampling
from crosscut.serving.chat import ChatTemplate
from crosscut.serving.fields import Fields, is_text, shown
from crosscut.serving.refusals import Refusal

MOST_CHOICES = 128
"""Texts that one request may ask for, prompts times `n`."""

MOST_STOPS = 16
MOST_ALTERNATIVES = 20
DEFAULT_TOKENS = 16
"""Of a completion that does not say; a chat's answer may fill the window."""

_SEEDS = 1 << 63

_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Fields for the caller's books, which ask for nothing."""

_NO_PENALTY = "Penalties by count are not supported; `repetition_penalty` is."
_NO_TOOLS = "Tools are not supported: describe them in a message."
_TEXT_ONLY = "Only text is read and written here."

_COMPLETION_ONLY_AS: dict[str, tuple[Sequence[object], str]] = {
    "suffix": (("",), "Text is only written after a prompt."),
}

_CHAT_ONLY_AS: dict[str, tuple[Sequence[object], str]] = {
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "response_format": (({"type": "text"},), "Forms are not enforced: ask for them in a message."),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "prediction": ((), "Predicted outputs are not supported."),
    "reasoning_effort": (("none",), "How long a model thinks is up to its template: ask in a message."),
    "verbosity": (("medium",), "Ask for a length in a message."),
    "web_search_options": ((), "The server does not reach the web."),
    "store": ((False,), "Nothing is stored here."),
}

_BOTH_ONLY_AS: dict[str, tuple[Sequence[object], str]] = {
    "presence_penalty": ((0,), _NO_PENALTY),
    "frequency_penalty": ((0,), _NO_PENALTY),
    "logit_bias": (({},), "Single tokens cannot be favoured."),
    "service_tier": (("auto", "default"), "There is one tier."),
}

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""The roles that are taken, and what templates call them."""

_MESSAGE_ONLY_AS: dict[str, tuple[Sequence[object], str]] = {
    "tool_calls": (([],), _NO_TOOLS),
    "function_call": ((), _NO_TOOLS),
    "tool_call_id": ((), _NO_TOOLS),
    "audio": ((), _TEXT_ONLY),
    "refusal": ((), "Put it into `content`."),
    "annotations": (([],), _TEXT_ONLY),
}


@dataclass(frozen=True, kw_only=True)
class Served:
    """What requests are held against: the model that is served."""

    name: str
    window: int
    """Tokens that a prompt and its continuation have together."""
    tokenizer: Tokenizer
    begin: int | None
    """The id that the model expects before every text, if any."""
    stops: frozenset[int]
    """Tokens that end a text."""
    template: ChatTemplate | None
    """None where the model has none: it completes text, but does not chat."""
    created: int
    """When the server was started, in seconds since 1970."""


@dataclass(frozen=True)
class Order:
    """One text that is to be written."""

    prompt: tuple[int, ...]
    sampling: Sampling
    sample: int
    """Which of several texts with the same prompt and seed."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a client asks for."""

    prompts: tuple[tuple[int, ...], ...]
    num_choices: int
    """Texts for each prompt."""
    sampling: Sampling
    stream: bool
    include_usage: bool
    """Whether a stream ends with the counts of tokens."""
    echoed: tuple[str, ...] = ()
    """What the texts of each prompt begin with, where prompts are told again."""

    def orders(self) -> Iterator[Order]:
        """The texts to write, in the order of their choices: all of the first prompt, then all of the second, ..."""
        for prompt in self.prompts:
            for sample in range(self.num_choices):
                yield Order(prompt, self.sampling, sample)


def read_completion(body: object, served: Served) -> Request:
    """A request of the completions protocol. Raises `Refusal`."""
    fields = Fields(body)
    _check_model(fields, served)
    prompts, texts = zip(*_prompts(fields, served), strict=True)
    num_choices = fields.integer("n", 1, MOST_CHOICES) or 1
    if (best_of := fields.integer("best_of", 1, MOST_CHOICES) or num_choices) != num_choices:
        fields.refuse("best_of", f"be `n` ({num_choices}) or left out", "All texts that are written are told.")
    if len(prompts) * num_choices > MOST_CHOICES or best_of > MOST_CHOICES:
        count = len(prompts) * num_choices
        raise Refusal(
            f"`prompt` x `n` must be at most {MOST_CHOICES} texts, but is {count}. Send several requests.", field="n"
        )
    alternatives = fields.integer("logprobs", 0, MOST_ALTERNATIVES)
    echo = fields.flag("echo")
    if echo and alternatives is not None:
        fields.refuse("echo", "be false with `logprobs`", "Probabilities are told of what is written, not of prompts.")
    num_tokens = fields.integer("max_tokens", 1, 1 << 31)
    for name, (harmless, reason) in _COMPLETION_ONLY_AS.items():
        fields.only(name, harmless, reason)
    echoed = texts if echo else ()
    return _request(fields, served, prompts, num_choices, num_tokens or DEFAULT_TOKENS, alternatives, echoed)


def read_chat(body: object, served: Served) -> Request:
    """A request of the chat protocol. Raises `Refusal`."""
    if served.template is None:
        raise Refusal(
            f"`{served.name}` must have a chat template to chat, but has none. Use /v1/completions.",
            code="no_chat_template",
        )
    fields = Fields(body)
    _check_model(fields, served)
    prompt = tuple(served.template.tokens(_messages(fields)))
    num_choices = fields.integer("n", 1, MOST_CHOICES) or 1
    told = fields.flag("logprobs")
    alternatives = fields.integer("top_logprobs", 0, MOST_ALTERNATIVES)
    if alternatives is not None and not told:
        fields.refuse("top_logprobs", "be left out unless `logprobs` is true")
    old, new = (fields.integer(name, 1, 1 << 31) for name in ("max_tokens", "max_completion_tokens"))
    if old and new and old != new:
        fields.refuse("max_tokens", f"be `max_completion_tokens` ({new}) or left out")
    for name, (harmless, reason) in _CHAT_ONLY_AS.items():
        fields.only(name, harmless, reason)
    alternatives = (alternatives or 0) if told else None
    return _request(fields, served, (prompt,), num_choices, new or old, alternatives)


def _request(
    fields: Fields,
    served: Served,
    prompts: tuple[tuple[int, ...], ...],
    num_choices: int,
    num_tokens: int | None,
    alternatives: int | None,
    echoed: tuple[str, ...] = (),
) -> Request:
    """What both protocols have in common, and the check that nothing else was asked for."""
    stream = fields.flag("stream")
    include_usage = _include_usage(fields, stream=stream)
    temperature = fields.number("temperature", 0, 2)
    seed = fields.integer("seed", -_SEEDS, _SEEDS - 1)
    sampling = Sampling(
        num_tokens=_within_window(prompts, num_tokens, served.window),
        temperature=1.0 if temperature is None else temperature,
        top_k=fields.integer("top_k", 0, 1 << 31) or 0,
        top_p=_share(fields, "top_p"),
        repetition_penalty=_penalty(fields),
        seed=secrets.randbits(32) if seed is None else seed,
        stop=_stops(fields),
        alternatives=alternatives,
    )
    for name, (harmless, reason) in _BOTH_ONLY_AS.items():
        fields.only(name, harmless, reason)
    for name in _LABELS:
        fields.get(name)
    fields.finish()
    return Request(
        prompts=prompts,
        num_choices=num_choices,
        sampling=sampling,
        stream=stream,
        include_usage=include_usage,
        echoed=echoed,
    )


def _check_model(fields: Fields, served: Served) -> None:
    name = fields.text("model")
    if name is None:
        fields.refuse("model", f"be a model that is served (`{served.name}`)")
    if name != served.name:
        raise unknown_model(name, served)


def unknown_model(name: str, served: Served) -> Refusal:
    """What is said to a client that asks for another model."""
    return Refusal(
        f"`model` must be a model that is served (`{served.name}`), but is {shown(name)}.",
        status=404,
        field="model",
        code="model_not_found",
    )


def _prompts(fields: Fields, served: Served) -> tuple[tuple[tuple[int, ...], str], ...]:
    """The prompts as ids and as texts: one or several, each sent as a text or as ids."""
    value = fields.get("prompt")
    if isinstance(value, list) and value and not all(isinstance(one, int) and one is not True for one in value):
        prompts = value
    else:
        prompts = [value]
    if len(prompts) > MOST_CHOICES:
        fields.refuse("prompt", f"hold at most {MOST_CHOICES} prompts", "Send several requests.")
    return tuple(_prompt(fields, prompt, served) for prompt in prompts)


def _prompt(fields: Fields, prompt: object, served: Served) -> tuple[tuple[int, ...], str]:
    """The ids of one prompt and its text. Those of a text begin as the model expects; special tokens in it are read."""
    vocab_size = served.tokenizer.vocab_size
    if prompt in ("", []):
        fields.refuse("prompt", "hold at least one token")
    if is_text(prompt):
        return tuple(served.tokenizer.encode_prompt(prompt, begin=served.begin)), prompt
    if not isinstance(prompt, list) or not all(type(one) is int for one in prompt):
        fields.refuse("prompt", "be a text, a list of token ids, or a list of either")
    if not all(0 <= one < vocab_size for one in prompt):
        fields.refuse("prompt", f"hold ids from 0 to {vocab_size - 1}")
    return tuple(prompt), served.tokenizer.decode(prompt)


def _messages(fields: Fields) -> list[dict[str, str]]:
    value = fields.get("messages")
    if not isinstance(value, list) or not value:
        fields.refuse("messages", "be a list of at least one message")
    return [_message(one, f"messages[{number}]") for number, one in enumerate(value)]


def _message(value: object, place: str) -> dict[str, str]:
    fields = Fields(value, place)
    role = fields.text("role")
    if role not in _ROLES:
        do = _NO_TOOLS if role in ("tool", "function") else ""
        fields.refuse("role", "be system, developer, user or assistant", do)
    message = {"role": _ROLES[role], "content": _content(fields)}
    if (name := fields.text("name")) is not None:
        message["name"] = name
    for key, (harmless, reason) in _MESSAGE_ONLY_AS.items():
        fields.only(key, harmless, reason)
    fields.finish()
    return message


def _content(fields: Fields) -> str:
    """A message's text, which may come in parts."""
    value = fields.get("content")
    if is_text(value):
        return value
    if not isinstance(value, list) or not value:
        fields.refuse("content", "be a text or a list of parts")
    parts = [Fields(part, f"{fields.path('content')}[{number}]") for number, part in enumerate(value)]
    texts = []
    for part in parts:
        if part.text("type") != "text":
            part.refuse("type", 'be "text"', _TEXT_ONLY)
        if (text := part.text("text")) is None:
            part.refuse("text", "be a text")
        part.finish()
        texts.append(text)
    return "".join(texts)


def _include_usage(fields: Fields, *, stream: bool) -> bool:
    value = fields.get("stream_options")
    if value is None:
        return False
    if not stream:
        fields.refuse("stream_options", "be left out unless `stream` is true")
    options = Fields(value, "stream_options")
    include = options.flag("include_usage")
    options.only("include_obfuscation", (False,), "Streams are not padded here.")
    options.finish()
    return include


def _within_window(prompts: tuple[tuple[int, ...], ...], num_tokens: int | None, window: int) -> int:
    longest = max(len(prompt) for prompt in prompts)
    room = window - longest + 1  # the last token need not be read
    if (num_tokens or 1) > room:
        asked = "an answer" if num_tokens is None else f"{num_tokens} tokens of continuation"
        raise Refusal(
            f"The prompt and {asked} must fit in the model's window of {window} tokens, but the prompt has {longest}. "
            f"Shorten it{'' if num_tokens is None else ', or ask for fewer tokens'}.",
            code="context_length_exceeded",
            field="prompt",
        )
    return num_tokens or room


def _share(fields: Fields, name: str) -> float:
    share = fields.number(name, 0, 1)
    if share == 0:
        fields.refuse(name, "be above 0 and at most 1", "Set `temperature` to 0 for the likeliest token.")
    return 1.0 if share is None else share


def _penalty(fields: Fields) -> float:
    penalty = fields.number("repetition_penalty", 0, 100)
    if penalty == 0:
        fields.refuse("repetition_penalty", "be above 0")
    return 1.0 if penalty is None else penalty


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    stops = [] if value is None else value if isinstance(value, list) else [value]
    if len(stops) > MOST_STOPS or not all(is_text(stop) and stop for stop in stops):
        fields.refuse("stop", f"be a text or up to {MOST_STOPS} texts, none of them empty")
    return tuple(stops)
