"""Samples of rejects: named as documents are, whatever the names hold and wherever the files lie."""

import json
from pathlib import Path
from typing import Any

from crosscut.corpus.audit.rejects import rejected_samples
from crosscut.corpus.audit.samples import SAMPLES


def samples(work: Path, *rejects: dict[str, str]) -> list[dict[str, Any]]:
    (work / "ingest").mkdir(parents=True)
    rest = {"source": "mail", "rule": "not a mail", "reason": "empty", "excerpt": "From"}
    lines = [json.dumps(rest | reject) for reject in rejects]
    (work / "ingest" / "000000.rejects.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return rejected_samples(work, 1234)["not a mail"]


def test_what_is_no_utf_8_is_written_out(tmp_path):
    bad = {"file": "/data/bad\udcff.eml", "place": "start", "reason": "no \udcfe", "excerpt": "\udcfd"}
    (sample,) = samples(tmp_path / "a", bad)
    assert sample == {"id": "mail/bad\\udcff.eml#start", "detail": "no \\udcfe", "other": "", "text": "\\udcfd"}
    (named,) = samples(tmp_path / "b", {**bad, "name": "mail/2003/bad\\udcff.eml"})
    assert named["id"] == "mail/2003/bad\\udcff.eml#start"
    json.dumps([sample, named], ensure_ascii=False).encode()


def test_samples_are_the_same_wherever_the_files_lie(tmp_path):
    def chosen(folder: str, **names: str) -> list[dict[str, Any]]:
        some = [{"file": f"{folder}/{number}.eml", "place": "start"} for number in range(40)]
        named = [
            {**one, **{key: name.format(number) for key, name in names.items()}} for number, one in enumerate(some)
        ]
        return samples(tmp_path / folder.strip("/"), *named)

    here = chosen("/here")
    assert len(here) == SAMPLES
    assert here == chosen("/elsewhere") == chosen("/named", name="mail/{}.eml")
    assert not any("/here" in json.dumps(one) for one in here)
