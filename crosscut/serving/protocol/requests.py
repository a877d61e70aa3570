"""Requests of clients to generate text, read from OpenAI's completions or chat protocol.

The server never ignores a field that it does not support (`unsupported`), but refuses the request with a reason. A
client that requests tools, for example, learns that the server has none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from crosscut.config.checks import MOST
from crosscut.config.generation.sampling import Sampling
from crosscut.data import Tokenizer
from crosscut.data.tokenization.token_bytes import TokenBytes
from crosscut.serving.news import TextOrder
from crosscut.serving.protocol.chat import ChatTemplate
from crosscut.serving.protocol.choices import read_sampling
from crosscut.serving.protocol.fields import Fields, RequestKind, is_text, shown
from crosscut.serving.protocol.messages import read_messages
from crosscut.serving.protocol.model import ServedModel, require_model
from crosscut.serving.protocol.refusals import Refusal, require_bytes
from crosscut.serving.protocol.unsupported import COMPLETION_ONLY_AS, LABELS, ONLY_AS, Known
from crosscut.serving.tokens import surplus_of

MOST_CHOICES = 128
"""Maximum number of texts per request: the number of prompts times `n`."""

MOST_SLIDING = 1 << 16
"""Maximum number of tokens of a prompt that is longer than the window."""

MOST_ALTERNATIVES = 20
"""Maximum number of likeliest tokens that are reported with each token."""

DEFAULT_TOKENS = 16
"""Default number of tokens in a completion. A chat answer may fill the window by default."""


@dataclass(frozen=True, kw_only=True)
class ServedDecoder(ServedModel):
    """The served model if it predicts the next token."""

    slide: bool
    """Whether a text may be longer than the window."""
    begin: int | None
    """Token id that the model expects at the start of every text. None if the model expects no such token."""
    end_of_text: int
    """Token id that ends a document. If `begin` is None, a text without a prompt starts with this id."""
    stops: frozenset[int]
    """Ids that end a text."""
    can_chat: bool
    """Whether the model has a chat template. Without a template, the model only completes text."""

    def load(self, kind: RequestKind) -> None:
        """Load what it takes to read requests of this kind (`chat` or `completion`)."""
        if kind is RequestKind.CHAT:
            assert self.template is not None
            assert self.template.longest
        else:
            self.encoder.encode_prompt("")
            assert self.spell.longest

    @cached_property
    def encoder(self) -> Tokenizer:
        """Tokenizer that encodes prompts."""
        return Tokenizer.load(self.tokenizer, end_of_text=self.end_of_text)

    @cached_property
    def spell(self) -> TokenBytes:
        """Bytes of every token."""
        return TokenBytes.load(self.tokenizer)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """Chat template. None if the model has no template."""
        return ChatTemplate.find(self.tokenizer)

    @cached_property
    def most_tokens(self) -> int:
        """Maximum number of tokens of a prompt."""
        return max(self.window, MOST_SLIDING) if self.slide else self.window


@dataclass(frozen=True, kw_only=True)
class Request:
    """A client's request to generate text."""

    prompts: tuple[tuple[int, ...], ...]
    num_choices: int
    """Number of texts to generate per prompt."""
    sampling: Sampling
    stream: bool
    include_usage: bool
    """Whether the stream ends with the token counts."""
    echoed: tuple[str, ...] = ()
    """Texts of the prompts if the client requested an echo, otherwise empty."""
    surplus: tuple[int, ...] = ()
    """For each prompt whose tokens are reported one by one, the number of characters by which the tokens exceed the
    text (`surplus_of`)."""

    def orders(self) -> Iterator[TextOrder]:
        """Yield the texts to generate, in the order of the answer's choices: all texts of the first prompt, then all
        texts of the second prompt, and so on.
        """
        for number, prompt in enumerate(self.prompts):
            for sample in range(self.num_choices):
                yield TextOrder(prompt, self.sampling, sample, number * self.num_choices + sample)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """Request fields whose names differ between the two protocols."""

    prompts: tuple[tuple[int, ...], ...]
    num_choices: int
    num_tokens: int | None
    """Maximum number of generated tokens. If None, the text may fill the model's window."""
    alternatives: int | None
    echoed: tuple[str, ...] = ()


def read_completion(body: object, served: ServedDecoder) -> Request:
    """Read a request of the completions protocol. Raises `Refusal`."""
    fields = Fields(body)
    require_model(fields, served.name)
    echo = fields.flag("echo")
    prompts, texts = zip(*_prompts(fields, served, echo=echo), strict=True)
    num_choices = fields.integer("n", 1, MOST_CHOICES) or 1
    if (best_of := fields.integer("best_of", 1, MOST_CHOICES) or num_choices) != num_choices:
        fields.refuse(
            "best_of", f"equal `n` ({num_choices}) or be omitted", "The server returns all texts that it generates."
        )
    if len(prompts) * num_choices > MOST_CHOICES or best_of > MOST_CHOICES:
        count = len(prompts) * num_choices
        raise Refusal(
            f"`prompt` x `n` must be at most {MOST_CHOICES} texts, but is {count}. Send several requests.", field="n"
        )
    alternatives = fields.integer("logprobs", 0, MOST_ALTERNATIVES)
    num_tokens = fields.integer("max_tokens", 0, MOST)
    wanted = _Wanted(
        prompts=prompts,
        num_choices=num_choices,
        num_tokens=DEFAULT_TOKENS if num_tokens is None else num_tokens,
        alternatives=alternatives,
        echoed=texts if echo else (),
    )
    return _request(fields, served, wanted, only_as={**COMPLETION_ONLY_AS, **ONLY_AS})


def read_chat(body: object, served: ServedDecoder) -> Request:
    """Read a request of the chat protocol. Raises `Refusal`."""
    if not served.can_chat:
        raise Refusal(
            f"`{served.name}` must have a chat template to chat, but has none. Use /v1/completions.",
            code="no_chat_template",
        )
    fields = Fields(body)
    require_model(fields, served.name)
    assert served.template is not None
    prompt = tuple(served.template.tokens(read_messages(fields), most_tokens=served.most_tokens))
    _require_known(prompt, served, "messages")
    num_choices = fields.integer("n", 1, MOST_CHOICES) or 1
    told = fields.flag("logprobs")
    alternatives = fields.integer("top_logprobs", 0, MOST_ALTERNATIVES)
    if alternatives is not None and not told:
        fields.refuse("top_logprobs", "be omitted unless `logprobs` is true")
    old, new = (fields.integer(name, 1, MOST) for name in ("max_tokens", "max_completion_tokens"))
    if old and new and old != new:
        fields.refuse("max_tokens", f"equal `max_completion_tokens` ({new}) or be omitted")
    wanted = _Wanted(
        prompts=(prompt,),
        num_choices=num_choices,
        num_tokens=new or old,
        alternatives=(alternatives or 0) if told else None,
    )
    return _request(fields, served, wanted, only_as=ONLY_AS)


def _request(fields: Fields, served: ServedDecoder, wanted: _Wanted, *, only_as: Known) -> Request:
    """Read the fields that both protocols share, and refuse fields that have not been read. `only_as` lists the
    unsupported fields. They are accepted only with values that have no effect.
    """
    stream = fields.flag("stream")
    include_usage = _include_usage(fields, stream=stream)
    tell_prompt = bool(wanted.echoed) and wanted.alternatives is not None
    num_tokens = _within_window(wanted.prompts, wanted.num_tokens, served, tell_prompt=tell_prompt)
    most = MOST_CHOICES * served.window // (len(wanted.prompts) * wanted.num_choices)
    if not stream and num_tokens > most:
        fields.refuse(
            "max_tokens",
            f"be at most {most} unless `stream` is true",
            "Without a stream, the whole answer is kept in memory.",
        )
    sampling = read_sampling(
        fields,
        num_tokens=num_tokens,
        alternatives=wanted.alternatives,
        tell_prompt=tell_prompt,
        vocab_size=served.vocab_size,
    )
    for name, (harmless, reason) in only_as.items():
        fields.only(name, harmless, reason)
    for name in LABELS:
        fields.get(name)
    fields.finish()
    return Request(
        prompts=wanted.prompts,
        num_choices=wanted.num_choices,
        sampling=sampling,
        stream=stream,
        include_usage=include_usage,
        echoed=wanted.echoed,
        surplus=_surplus(wanted, served) if tell_prompt else (),
    )


def _surplus(wanted: _Wanted, served: ServedDecoder) -> tuple[int, ...]:
    texts = zip(wanted.echoed, wanted.prompts, strict=True)
    return tuple(surplus_of(text, map(served.spell, prompt)) for text, prompt in texts)


def _prompts(fields: Fields, served: ServedDecoder, *, echo: bool) -> list[tuple[tuple[int, ...], str]]:
    """Read the prompts. Returns the token ids and the text of each prompt. A request holds one or several prompts, each
    as a string or as a list of token ids. A missing prompt counts as an empty text. With `echo`, ids are also decoded.

    The first prompt that is too long for the window is the last one that is read, because the request will be refused.
    """
    value = fields.get("prompt")
    if value is None:
        prompts: list[object] = [""]
    elif isinstance(value, list) and value and not all(isinstance(one, int) and one is not True for one in value):
        prompts = value
    else:
        prompts = [value]
    if len(prompts) > MOST_CHOICES:
        raise Refusal(
            f"`prompt` must hold at most {MOST_CHOICES} prompts, but has {len(prompts)}. Send several requests.",
            field="prompt",
        )
    found = []
    for prompt in prompts:
        found.append(_prompt(fields, prompt, served, echo=echo))
        if len(found[-1][0]) > served.most_tokens:
            break
    return found


def _prompt(fields: Fields, prompt: object, served: ServedDecoder, *, echo: bool) -> tuple[tuple[int, ...], str]:
    """Read one prompt, a string or a list of token ids. Returns its token ids and its text. A string is encoded with
    the start token if the model expects one. Special tokens that are spelled out in the string become special tokens.
    """
    if is_text(prompt):
        require_bytes(prompt, "prompt", served.most_tokens, served.spell.longest)
        ids = tuple(served.encoder.encode_prompt(prompt, begin=served.begin) or [served.end_of_text])
        _require_known(ids, served, "prompt")
        return ids, prompt
    if prompt == []:
        fields.refuse("prompt", "have at least one token if it is a list of ids", 'Send "" to start a new text.')
    if not isinstance(prompt, list) or not all(type(one) is int for one in prompt):
        fields.refuse("prompt", "be a string, a list of token ids, a list of strings, or a list of lists of token ids")
    if not 0 <= min(prompt) <= max(prompt) < served.vocab_size:
        fields.refuse("prompt", f"hold ids from 0 to {served.vocab_size - 1}")
    is_decoded = echo and len(prompt) <= served.most_tokens
    return tuple(prompt), served.encoder.decode(prompt, with_special=True) if is_decoded else ""


def _require_known(ids: tuple[int, ...], served: ServedDecoder, field: str) -> None:
    """Raise `Refusal` if `ids` contain a token that the tokenizer has but the model does not have."""
    if (largest := max(ids)) >= served.vocab_size:
        token = served.encoder.decode([largest], with_special=True)
        raise Refusal(
            f"`{field}` must hold only tokens that the model has (ids from 0 to {served.vocab_size - 1}), but holds "
            f"{shown(token)}, which only the tokenizer has (id {largest}). Remove this token.",
            field=field,
        )


def _include_usage(fields: Fields, *, stream: bool) -> bool:
    value = fields.get("stream_options")
    if value is None:
        return False
    if not stream:
        fields.refuse("stream_options", "be omitted unless `stream` is true")
    options = Fields(value, "stream_options")
    include = options.flag("include_usage")
    options.only("include_obfuscation", (False,), "This server does not pad streams.")
    options.finish()
    return include


def _within_window(
    prompts: tuple[tuple[int, ...], ...], num_tokens: int | None, served: ServedDecoder, *, tell_prompt: bool
) -> int:
    """Return the maximum number of tokens to generate per text. If `num_tokens` is None, the text may fill the window.
    If the server also slides the window, the text may always have at least half a window of new tokens. Raises
    `Refusal` if the prompt or the text is too long.
    """
    longest, window = max(len(prompt) for prompt in prompts), served.window
    if served.slide and longest > served.most_tokens:
        raise Refusal(
            f"The prompt must have at most {served.most_tokens} tokens, but has {longest}. The model would ignore the "
            "beginning of such a long prompt in any case. Shorten the prompt.",
            code="context_length_exceeded",
            field="prompt",
        )
    room = window - longest + 1  # the model need not read the last generated token
    if served.slide and not (tell_prompt and room < 1):
        return max(room, window // 2) if num_tokens is None else num_tokens
    if max(num_tokens or 0, 1) > room:
        asked = {None: " and an answer", 0: ""}.get(num_tokens, f" and {num_tokens} tokens of continuation")
        do = ", or request fewer tokens" if num_tokens else ""
        if served.slide:
            asked, do = " with requested probabilities", ", or omit `echo`"
        raise Refusal(
            f"The prompt{asked} must fit in the model's window of {window} tokens, but the prompt has {longest}. "
            f"Shorten the prompt{do}.",
            code="context_length_exceeded",
            field="prompt",
        )
    return room if num_tokens is None else num_tokens
