"""A tiny model with a chat template, and conversations for it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pretrained.conftest import published  # noqa: F401 - a fixture

PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A template without marks."""
ENDED = PLAIN.replace(
    "{{ message.content }}", "{{ message.content }}{% if message.role == 'assistant' %}<|endoftext|>{% endif %}"
)
"""The template `PLAIN` with a token that ends each answer."""
MARKED = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}\n{% endgeneration %}{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The template `PLAIN` with marks around the answers."""


def chats(number: int) -> list[dict[str, object]]:
    """Short conversations of one or two turns."""
    found = []
    for i in range(number):
        turns = [{"role": "user", "content": f"the fox {i}"}, {"role": "assistant", "content": "jumps over"}]
        found.append({"messages": turns * (1 + i % 2)})
    return found


def write_chats(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="session")
def model(published: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The folder of a tiny Llama whose heads two and four ranks can share."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(published("llama tied"), folder)
    (folder / "chat_template.jinja").write_text(ENDED)
    return folder
