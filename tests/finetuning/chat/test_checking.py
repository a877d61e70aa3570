"""Conversations are decoded again before the training: each answer ends with a stop, and comes back as written."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from crosscut.config import DataError
from crosscut.data import Tokenizer
from crosscut.finetuning.chat.checking import Allowed, AnswerCheck
from crosscut.finetuning.chat.conversations import Conversation
from crosscut.finetuning.chat.masking import Masker
from crosscut.pretrained.companions import speech
from tests.finetuning.chat import templates
from tests.finetuning.chat.conftest import MARKED, PLAIN
from tests.refusals import refusal

Check = Callable[..., "str | None"]

ONE = [("user", "the fox?"), ("assistant", "jumps over\n")]
TWO = [*ONE, ("user", "dog"), ("assistant", "  lazy  dog")]
SYSTEM = [("system", "be quick"), *ONE]
THOUGHT = [("user", "the fox?"), ("assistant", "<think>\nthe lazy dog\n</think>\n\njumps")]


@pytest.fixture
def check(model: Path, tmp_path: Path) -> Check:
    """Function that checks a conversation for each list of (role, content), and returns the token that becomes a stop,
    or None.
    """

    def run(
        template: str,
        *chats: list[tuple[str, str]],
        vocab_size: int = 400,
        begin: int | None = None,
        normalizer: normalizers.Normalizer | None = None,
        **allowed: bool,
    ) -> str | None:
        path = templates.write_speaker(tmp_path / "speaker", model / "tokenizer.json", template)
        if normalizer is not None:
            inner = tokenizers.Tokenizer.from_file(str(path))
            inner.normalizer = normalizer
            inner.save(str(path))
        masker, tokenizer = Masker(path), Tokenizer.load(path)
        encoded = []
        for number, chat in enumerate(chats):
            messages = tuple({"role": role, "content": content} for role, content in chat)
            answers = tuple(index for index, (role, _) in enumerate(chat) if role == "assistant")
            encoded.append(masker.encode(Conversation(f"chats.jsonl:{number + 1}", messages, answers)))
        spoken = replace(speech(path, []), begin_of_text=begin)
        check = AnswerCheck(encoded, tokenizer, spoken, vocab_size)
        end = check.run(Allowed(**allowed), is_marked=masker.is_marked)
        return None if end is None else tokenizer.decode([end], with_special=True)

    return run


FORMS = [
    pytest.param("CHATML", [ONE, TWO, SYSTEM, THOUGHT], "<|im_end|>", id="ChatML"),
    pytest.param("LLAMA_3", [ONE, TWO, SYSTEM, THOUGHT], "<|eot_id|>", id="Llama 3"),
    pytest.param("LLAMA_2", [ONE, TWO, SYSTEM, THOUGHT], None, id="Llama 2"),
    pytest.param("MISTRAL", [ONE, TWO, THOUGHT], None, id="Mistral"),
    pytest.param("GEMMA", [ONE, TWO, THOUGHT], "<end_of_turn>", id="Gemma"),
    pytest.param("PHI_3", [ONE, SYSTEM, THOUGHT], "<|end|>", id="Phi 3"),
    pytest.param("PHI_4", [ONE, TWO, SYSTEM, THOUGHT], "<|im_end|>", id="Phi 4"),
    pytest.param("ZEPHYR", [ONE, TWO, SYSTEM, THOUGHT], None, id="Zephyr"),
    pytest.param("DEEPSEEK_CODER", [ONE, TWO, SYSTEM], "<|EOT|>", id="DeepSeek Coder"),
    pytest.param("DEEPSEEK_R1", [ONE, TWO], None, id="DeepSeek R1"),
]
"""Templates with the token that becomes a stop. `<|endoftext|>` is the only stop of the model."""


@pytest.mark.parametrize(("name", "chats", "end"), FORMS)
def test_an_end_that_all_answers_share_becomes_a_stop(check, name, chats, end, capsys):
    assert check(getattr(templates, name), *chats) == end
    told = f"All answers end with `{end}`. This token becomes a stop of the run.\n" if end else ""
    assert capsys.readouterr().err == told


def test_a_template_may_mark_several_passages_of_an_answer(check):
    """The stops are then counted for the whole conversation."""
    passages = "{% generation %}{{ m.content[:4] }}{% endgeneration %}{% generation %}{{ m.content[4:] }}<|im_end|>"
    template = templates.CHATML.replace(
        "{{ m.content }}<|im_end|>",
        "{% if m.role == 'user' %}{{ m.content }}<|im_end|>{% else %}" + passages + "{% endgeneration %}{% endif %}",
    )
    assert check(template, ONE, TWO) == "<|im_end|>"
    unended = template.replace("<|im_end|>{% endg", "{{ '<|im_end|>' if loop.last else '' }}{% endg")
    assert "but 2 of 3 answers do not" in refusal(DataError, check, unended, ONE, TWO)


UNENDED = templates.CHATML.replace("<|im_end|>", "")
ASKED = "{% if not add_generation_prompt %}<|im_start|>user{% endif %}"
ENDLESS = {
    "nothing ends an answer": (
        PLAIN,
        r"the loss ends with ' jumps over\n\n'. Let the chat template write `<|endoftext|>` at the end of each answer.",
    ),
    "marks without an end": (MARKED, "write `<|endoftext|>` at the end of each answer, before `{% endgeneration %}`."),
    "an end behind the marks": (
        MARKED.replace("{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
        "In the chat template, move `{% endgeneration %}` behind `<|im_end|>`.",
    ),
    "an end before the next message": (
        PLAIN.replace("{{ message.role }}", "{% if not loop.first %}<|im_end|>{% endif %}{{ message.role }}").replace(
            "}assistant: ", "}<|im_end|>assistant: "
        ),
        "Let the chat template write `<|endoftext|>` at the end of each answer.",
    ),
    "an end that no token has": (
        PLAIN.replace("\n{% endfor", "<|stop|>{% endfor"),
        r"the loss ends with '<|stop|>'. Let the chat template write `<|endoftext|>` at the end of each answer.",
    ),
    "ChatML without ends": (UNENDED, "Let the chat template write `<|endoftext|>` at the end of each answer."),
    "marks, and a question after each answer": (
        MARKED.replace("{{ message.role }}", "<|im_start|>{{ message.role }}") + ASKED,
        "Let the chat template write `<|endoftext|>` at the end of each answer, before `{% endgeneration %}`.",
    ),
    "a beginning as the end": (
        UNENDED.replace("{{ m.content }}\n", "{{ m.content }}\n{{ '<|im_start|>' if m.role == 'assistant' }}"),
        "Let the chat template write `<|endoftext|>` at the end of each answer.",
    ),
    "Llama 2 without ends": (
        templates.LLAMA_2.replace(" + eos_token", ""),
        "Let the chat template write `<|endoftext|>` at the end of each answer.",
    ),
    "an end after the last answer only": (
        MARKED.replace(
            "{{ message.content }}\n{% endg", "{{ message.content + ('<|im_end|>' if loop.last else '') }}{% endg"
        ),
        "Let the chat template write `<|im_end|>` at the end of each answer, before `{% endgeneration %}`.",
    ),
    "several ends": (
        PLAIN.replace("\n{% endfor", "{{ '<|eom_id|>' if 'jumps' in message.content else '<|eot_id|>' }}{% endfor"),
        "They end with special tokens that do not stop the model (`<|eom_id|>`, `<|eot_id|>`). Add the ids of those",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDLESS)
def test_answers_without_an_end_are_refused_with_the_remedy(check, case, capsys):
    template, message = ENDLESS[case]
    told = refusal(DataError, check, template, TWO, TWO)
    assert told.startswith(
        "Every answer must end with a token that stops generation (`<|endoftext|>`) and that the loss"
    )
    assert "but 4 of 4 answers do not. In the first, chats.jsonl:1, the loss ends with" in told
    assert message in told
    assert "Or pass --allow-endless" in told
    assert check(template, TWO, TWO, endless=True) is None
    assert capsys.readouterr().err == "4 of 4 answers do not end with a token that stops generation.\n"


SHOUTED = templates.CHATML.replace("m.content", "m.content | upper")
CUT = templates.CHATML.replace("m.content", "(m.content if m.role == 'assistant' else m.content[:3])")
STOPPED = templates.CHATML.replace("m.content", "m.content | replace('s ', 's <|endoftext|>')")
CHANGED = {
    "thoughts are left out": (
        templates.DEEPSEEK_R1,
        THOUGHT,
        "but 1 of 1 answer do not come back. The first, `mes",
        1,
        0,
    ),
    "capital letters": (SHOUTED, ONE, "and the model would learn 'JUMPS OVER\\n'.", 1, 1),
    "a stop inside of an answer": (STOPPED, ONE, "is 'jumps over\\n', and the model would learn 'jumps '.", 1, 0),
    "a system message that no question takes up": (
        templates.MISTRAL,
        SYSTEM,
        "`messages[0]` of chats.jsonl:1, is",
        0,
        1,
    ),
    "a question that is cut": (CUT, ONE, "the text of every message, but changes or leaves out 1 message.", 0, 1),
}


@pytest.mark.parametrize("case", CHANGED)
def test_messages_that_do_not_come_back_are_refused(check, case, capsys):
    template, chat, message, answers, others = CHANGED[case]
    told = refusal(DataError, check, template, chat)
    assert message in told
    assert told.startswith("What the model learns to write" if answers else "The chat template must render the text of")
    assert "or pass --allow-changed" in told
    check(template, chat, changed=True)
    counts = f"{answers} answer{'s' * (not answers)} and {others} other message{'s' * (not others)}"
    assert f"The chat template or the tokenizer changes {counts}.\n" in capsys.readouterr().err


def test_changed_spaces_are_counted(check, capsys):
    check(templates.CHATML.replace("m.content", "m.content | replace('  ', ' ')"), TWO)
    assert "tokenizer changes spaces or line breaks of 1 answer" in capsys.readouterr().err


NORMALIZED = [
    pytest.param(normalizers.NFC(), "\u09df \u212b cafe\u0301 \uf900 \u0958", id="NFC"),
    pytest.param(normalizers.NFKC(), "x\u00b2 \ufb01ne \uff76\uff9e\u00a0a", id="NFKC"),
]


@pytest.mark.parametrize(("normalizer", "answer"), NORMALIZED)
def test_an_answer_that_only_the_normalizer_changes_is_counted(check, normalizer, answer, capsys):
    """Tokenizers of Qwen compose characters, so these answers can be learned in their composed form only."""
    chat = [("user", "the fox?"), ("assistant", f" {answer}\n")]
    assert check(templates.CHATML, chat, ONE, normalizer=normalizer) == "<|im_end|>"
    assert "The normalizer of the tokenizer changes characters of 1 answer.\n" in capsys.readouterr().err
    told = refusal(DataError, check, CUT.replace("m.content if", "m.content[:-2] if"), chat, normalizer=normalizer)
    assert "but 1 of 1 answer do not come back" in told


def test_a_tokenizer_that_loses_characters_is_refused(check, model, tmp_path):
    """A vocabulary without the bytes of other characters, as some sentencepiece models have."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(special_tokens=["<|endoftext|>", "<unk>"], show_progress=False)
    inner.train_from_iterator(["the fox? jumps over user assistant"], trainer)
    (tmp_path / "bare").mkdir()
    inner.save(str(tmp_path / "bare" / "tokenizer.json"))
    path = templates.write_speaker(tmp_path / "bare", tmp_path / "bare" / "tokenizer.json", templates.CHATML)
    told = []
    for answer in ("jumps", "jumps 🙂"):
        messages = ({"role": "user", "content": "the fox?"}, {"role": "assistant", "content": answer})
        encoded = Masker(path).encode(Conversation("chats.jsonl:1", messages, (1,)))
        check = AnswerCheck([encoded], Tokenizer.load(path), speech(path, []), 400)
        try:
            told.append(check.run(Allowed(), is_marked=False))
        except DataError as error:
            told.append(str(error))
    assert told[0] == Tokenizer.load(path).encode_prompt("<|im_end|>")[0]
    assert "is 'jumps 🙂', and the model would learn 'jumps" in told[1]


def test_a_template_with_an_end_of_the_whole_text_needs_marks_for_several_turns(check):
    assert "Mark the answers in the template" in refusal(DataError, check, templates.PHI_3, TWO)


def test_a_token_that_the_model_lacks_is_named(check):
    told = refusal(DataError, check, templates.CHATML, ONE, vocab_size=291)
    assert told.startswith(
        "chats.jsonl:1: The conversation must have only tokens that the model has (ids from 0 to 290), but has "
        "`<|im_end|>`, which only the tokenizer has (id 292)."
    )


def test_the_token_that_begins_a_text_does_not_become_a_stop(check):
    """Prompts would then begin without this token."""
    template = templates.CHATML.replace("<|im_end|>", "<s>")
    told = refusal(DataError, check, template, ONE, begin=289)
    assert told.startswith(
        "Every answer must end with a token that stops generation (`<|endoftext|>`) and that the loss"
    )
    assert check(template, ONE) == "<s>"
