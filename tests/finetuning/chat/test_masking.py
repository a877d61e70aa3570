"""Masks of answers: equal to TRL's, with a template that marks answers and with one that does not."""

import json
import shutil
from pathlib import Path

import pytest

from crosscut.config import ConfigError, DataError
from crosscut.finetuning.chat.conversations import Conversation, read_conversations
from crosscut.finetuning.chat.masking import Masker
from tests.finetuning.chat.conftest import MARKED, PLAIN, write_chats
from tests.refusals import refusal

CHATS = [
    [{"role": "user", "content": "the quick fox"}, {"role": "assistant", "content": "jumps over"}],
    [
        {"role": "system", "content": "be lazy"},
        {"role": "user", "content": "dog?"},
        {"role": "assistant", "content": "  the  dog\n"},
        {"role": "user", "content": "fox?"},
        {"role": "assistant", "content": "Grün 🙂"},
    ],
]
GOLDEN = [
    (
        [85, 83, 264, 26, 259, 288, 284, 199, 65, 83, 83, 73, 83, 84, 65, 78, 84, 26, 285, 287, 199],
        "000000000000000000111",
    ),
    (
        [
            83, 89, 83, 84, 69, 77, 26, 221, 66, 69, 286, 199, 85, 83, 264, 26, 283, 31, 199, 65, 83, 83, 73, 83, 84,
            65, 78, 84, 26, 221, 221, 259, 221, 283, 199, 199, 85, 83, 264, 26, 284, 31, 199, 65, 83, 83, 73, 83, 84,
            65, 78, 84, 26, 221, 39, 82, 128, 121, 78, 221, 173, 254, 248, 225, 199,
        ],
        "00000000000000000000000000000011111100000000000000000011111111111",
    ),
]  # fmt: skip
"""Token ids and masks of `CHATS` from TRL 1.16.0 with transformers 5.23.0: `apply_chat_template` with the template
`MARKED` and `return_assistant_tokens_mask`, which `SFTTrainer` calls for `assistant_only_loss`.
"""
SMOLLM2 = (
    [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
     1, 4093, 198, 1780, 314, 216, 34, 1232, 216, 34, 47, 2, 198, 1, 520, 9531, 198, 36, 30, 2, 198],
    38,
)  # fmt: skip
"""The same from SmolLM2's tokenizer and template, with marks from the content of an answer to the end of its message:
ids, and the number of tokens before the answer."""


def masker(model: Path, folder: Path, template: str) -> Masker:
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(template)
    return Masker(folder / "tokenizer.json")


def conversation(messages: list[dict[str, str]], answers: tuple[int, ...] = ()) -> Conversation:
    every = tuple(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return Conversation("chats.jsonl:1", tuple(messages), answers or every)


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by the ends of the messages"])
def test_ids_and_masks_are_those_of_trl(model, tmp_path, template):
    masks = masker(model, tmp_path / "model", template)
    for messages, (ids, mask) in zip(CHATS, GOLDEN, strict=True):
        encoded = masks.encode(conversation(messages))
        assert encoded.ids.tolist() == ids
        assert "".join(map(str, encoded.mask.astype(int))) == mask


def test_smollm2_has_masks_without_marks_in_its_template(shared):
    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4."}]
    encoded = Masker(shared / "data" / "smollm2" / "tokenizer.json").encode(conversation(messages))
    ids, start = SMOLLM2
    assert encoded.ids.tolist() == ids
    assert encoded.mask.nonzero()[0].tolist() == list(range(start, len(ids)))


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by the ends of the messages"])
def test_an_answer_of_weight_0_is_read_but_not_learned(model, tmp_path, template):
    masks = masker(model, tmp_path / "model", template)
    both, last = (masks.encode(conversation(CHATS[1], answers)) for answers in ((2, 4), (4,)))
    assert last.ids.tolist() == both.ids.tolist()
    first = both.mask.nonzero()[0][:6]
    assert both.mask.sum() - last.mask.sum() == 6
    assert not last.mask[first].any()


def test_a_template_that_changes_earlier_messages_is_refused(model, tmp_path):
    forgetful = "{{ messages | length }}" + PLAIN
    masks = masker(model, tmp_path / "model", forgetful)
    with pytest.raises(DataError, match=r"^chats.jsonl:1: The chat template must render messages in the same way"):
        masks.encode(conversation(CHATS[0]))


def test_a_template_that_rejects_a_conversation_names_its_line(model, tmp_path):
    masks = masker(
        model, tmp_path / "model", "{{ raise_exception('no dogs') if messages[0].content == 'dog' }}" + PLAIN
    )
    messages = [{"role": "user", "content": "dog"}, {"role": "assistant", "content": "fox"}]
    with pytest.raises(DataError, match=r"^chats.jsonl:1: `messages` must suit .* but the template says: no dogs"):
        masks.encode(conversation(messages))


def test_a_model_without_a_template_is_refused(published, tmp_path):
    with pytest.raises(ConfigError, match=r"must hold a chat template, but has no `chat_template.jinja`"):
        Masker(published("llama") / "tokenizer.json")


# The reader of conversations


def test_openai_s_format_is_read(tmp_path):
    path = write_chats(
        tmp_path / "a.jsonl",
        [
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]},
                          {"role": "assistant", "content": "no", "weight": 0},
                          {"role": "user", "content": "hi", "name": "Ann"}, {"role": "assistant", "content": "yes"}]},
        ],
    )  # fmt: skip
    path.write_text("\n" + path.read_text())
    (found,) = read_conversations([path])
    assert found.place == f"{path}:2"
    assert found.answers == (3,)
    assert found.messages[0] == {"role": "user", "content": "hi"}
    assert found.messages[2] == {"role": "user", "content": "hi", "name": "Ann"}


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "The line must be a JSON object, but cannot be read: "),
        ("[]", "The line must be a JSON object, but is []. Write"),
        ("{}", "`messages` must be a list of at least one message, but is missing"),
        ({"messages": [{"role": "tool", "content": ""}]}, "`messages[0].role` must be system, developer, user or"),
        ({"messages": [{**USER, "nam": "Ann"}]}, "`messages[0].nam` must be a known field, but is not. Did you mean"),
        (
            {"messages": [USER]},
            "`messages` must have at least one message with the role assistant that the loss covers",
        ),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "`messages[0]` must be a message that the model"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "`messages[1].content` must be a string or a list"),
        ({"messages": [{**USER, "weight": 2}]}, "`messages[0].weight` must be a whole number from 0 to 1, but is 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    good = {"messages": [USER, {"role": "assistant", "content": "hi"}]}
    path.write_text(json.dumps(good) + "\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    assert refusal(DataError, read_conversations, [path]).startswith(f"{path}:2: {message}")


def test_a_file_without_conversations_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match="must hold at least one conversation, but holds none"):
        read_conversations([tmp_path / "a.jsonl"])
    with pytest.raises(DataError, match=r"must be a readable \.jsonl file, but is not"):
        read_conversations([tmp_path / "none.jsonl"])
