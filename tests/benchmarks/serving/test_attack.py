"""The benchmark of attackers among honest clients, with a few of each."""

import json
from pathlib import Path

import pytest

from benchmarks.serving import attack
from tests.serving.conftest import write_tokenizer, write_weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_weights(folder, write_tokenizer(folder))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))  # which the streams rule out
    (folder / "chat_template.jinja").write_text(attack._TEMPLATE)
    return folder


@pytest.mark.slow  # starts a server and its clients
def test_no_honest_stream_is_lost_among_attackers(model):
    measured = attack.measure(streams=8, attackers=len(attack.ATTACKS), turns=1, model=model)
    assert measured["lost"] == 0
    (alone, after), (attacked,) = measured["turns"]["alone"], measured["turns"]["attacked"]
    assert alone["lost"] == 0
    assert measured["ratio"] == 2 * attacked["seconds"] / (alone["seconds"] + after["seconds"])
    assert not any(alone["attacks"].values())
    assert {kind for kind, number in attacked["attacks"].items() if number} >= {
        "leaving while a template runs", "a stop string of two million characters", "fields nested 2,000 deep",
    }  # fmt: skip
