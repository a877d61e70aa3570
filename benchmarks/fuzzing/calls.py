"""Parts of Crosscut that cases reach by a call, because the command that uses them would not end by itself."""

from benchmarks.fuzzing.repetition.run import READ, read
from crosscut.config import CrosscutError
from crosscut.config.system.terminal import echo, printable
from crosscut.pretrained import find_model
from crosscut.serving.protocol.chat import ChatTemplate
from crosscut.serving.protocol.refusals import Refusal

CHAT = "@chat"
"""Word that takes the place of a command: read a model's folder as a server does, and encode a chat."""

MESSAGES = (
    [{"role": "user", "content": "What is a tensor?"}],
    [{"role": "user", "content": ""}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"},
     {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
)  # fmt: skip


def chat(place: str) -> int:
    """Encode chats with the chat template of a model's folder."""
    try:
        source = find_model(place)
        source.load_tokenizer()
        template = ChatTemplate.find(source.tokenizer)
        if template is not None:
            for messages in MESSAGES:
                _encode(template, messages)
    except CrosscutError as error:
        echo(printable(str(error)))
        return 2
    return 0


def _encode(template: ChatTemplate, messages: list[dict[str, str]]) -> None:
    try:
        template.tokens(messages)
    except Refusal as refusal:
        assert 400 <= refusal.status < 500, refusal.status


CALLS = {CHAT: chat, READ: read}
