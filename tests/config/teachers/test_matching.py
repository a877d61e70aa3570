"""Teachers whose model cannot teach: every command that reads the run refuses them with the same words."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from crosscut.cli.main import commands
from crosscut.config import ConfigError, load_run
from crosscut.config.teachers.matching import require_teachable
from tests.refusals import refusal

STUDENT = {
    "num_layers": 1, "hidden_size": 32, "num_heads": 4, "vocab_size": 300, "max_sequence_length": 64,
    "positions": "rotary",
}  # fmt: skip
BERT = {"positions": "learned", "attention": "bidirectional", "head": "masked_tokens"}
DYNAMIC = {"rotary_scaling": "dynamic", "rotary_factor": 2.0}
PACKED = ("training.document_mask=true",)
MASKED = ("data.objective=masked", *(f"model.{name}={value}" for name, value in BERT.items()))


def written(folder: Path, name: str, **changed: object) -> Path:
    """File of a run whose model is that of `STUDENT`, with changes."""
    place = folder / name
    place.mkdir()
    model = {**STUDENT, **changed}
    lines = [f"{key} = {json.dumps(value)}" for key, value in model.items()]
    length = f"sequence_length = {model['max_sequence_length']}"
    (place / "config.toml").write_text("\n".join(["[model]", *lines, "[training]", length]))
    return place / "config.toml"


FAULTS = [
    ({"vocab_size": 400}, (), "`teacher.folder` must hold a model whose `model.vocab_size` is that of the run (300)"),
    ({"max_sequence_length": 32}, (), "`training.sequence_length` must be at most 32, the `model.max_sequence_length`"),
    ({"num_heads": 2}, ("teacher.tensor=4", "layout.tensor=4"), "`teacher.tensor` must divide `model.num_heads` (2)"),
    (DYNAMIC, PACKED, '`training.document_mask` must be false with `model.rotary_scaling` = "dynamic" of the teacher'),
    ({"layers": ["sparse_attention gelu"]}, PACKED, "`training.document_mask` must be false with `sparse_attention`"),
    ({**BERT, "token_types": 2}, MASKED, "`model.token_types` must be at least 2 for pairs of segments with the teach"),
]


@pytest.mark.parametrize(("teacher", "settings", "told"), FAULTS, ids=lambda value: str(value)[:40])
def test_all_commands_refuse_a_teacher_with_the_same_words(
    tmp_path: Path, teacher: dict[str, object], settings: tuple[str, ...], told: str
) -> None:
    folder = written(tmp_path, "teacher", **teacher).parent
    arguments = (str(written(tmp_path, "run")), f"teacher.folder={folder}", *settings)
    message = refusal(ConfigError, require_teachable, load_run(Path(arguments[0]), arguments[1:]))
    assert message.startswith(told)
    for command in (("plan", "--gpu", "h100-sxm"), ("plan", "--dry-run"), ("verify",)):
        words = [command[0], *arguments, *command[1:]]
        assert refusal(ConfigError, CliRunner().invoke, commands, words, catch_exceptions=False).endswith(message)


def test_a_teacher_may_read_fewer_fields_than_the_model_and_its_vocabulary_may_be_unknown(tmp_path: Path) -> None:
    folder = written(tmp_path, "teacher", **BERT, token_types=1).parent
    run = load_run(written(tmp_path, "run"), (*MASKED, "model.token_types=2", f"teacher.folder={folder}"))
    require_teachable(run)
    unknown = load_run(written(tmp_path, "other"), (*MASKED, "model.vocab_size=0", f"teacher.folder={folder}"))
    require_teachable(unknown)


def test_a_run_with_stored_logits_needs_no_teacher(tmp_path: Path) -> None:
    words = (str(written(tmp_path, "run")), f"teacher.cache={tmp_path / 'cache'}")
    told = CliRunner().invoke(commands, ["plan", *words, "--gpu", "h100-sxm"], catch_exceptions=False).output
    assert "layouts fit, 0 do not" in told
