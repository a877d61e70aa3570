"""The record of skips is read as it was written, and anything else is refused."""

import json

import pytest

from crosscut.config import ConfigError
from crosscut.logbook.skips import Event, SampleSkip, SkipRecord, own_record, read_record

EVENT = Event(spike_step=61, back_to=50, sequences=44, reason="loss 9, usually 3", file="01-step-000061.txt")
RECORD = SkipRecord(skips=(SampleSkip(50, 44), SampleSkip(70, 4)), events=(EVENT,))


def test_a_record_is_read_as_it_was_written(tmp_path):
    assert own_record(tmp_path) is None
    RECORD.write(tmp_path)
    assert own_record(tmp_path) == RECORD


@pytest.mark.parametrize(
    "content",
    [
        "[]", "{}", '{"skips": 3}', '{"skips": [{"step": 1}]}', '{"skips": [{"step": 1, "sequences": 0}]}',
        '{"skips": [{"step": -1, "sequences": 4}]}', '{"skips": [{"step": true, "sequences": 4}]}', "{",
        '{"skips": [{"step": 5, "sequences": 4}, {"step": 5, "sequences": 4}]}',
        '{"skips": [], "events": [{"step": 5}]}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_record_is_refused(tmp_path, content):
    path = tmp_path / "skips.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"`.*skips\.json` must .* but .*"):
        read_record(path)


def test_fields_that_are_not_known_are_ignored(tmp_path):
    path = tmp_path / "skips.json"
    path.write_text(json.dumps({"skips": [{"step": 1, "sequences": 4, "more": 1}], "other": 2}))
    assert read_record(path).skips == (SampleSkip(1, 4),)
