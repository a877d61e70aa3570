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
    bad = {"name": "mail/bad\udcff.eml", "file": "/data/bad\udcff.eml", "place": "start"}
    (sample,) = samples(tmp_path, bad | {"reason": "no \udcfe", "excerpt": "\udcfd"})
    assert sample == {"id": "mail/bad\\udcff.eml#start", "detail": "no \\udcfe", "other": "", "text": "\\udcfd"}
    json.dumps(sample, ensure_ascii=False).encode()


def test_samples_are_the_same_wherever_the_files_lie(tmp_path):
    def chosen(folder: str) -> list[dict[str, Any]]:
        files = [f"{number}.eml" for number in range(40)]
        rejects = [{"name": f"mail/{file}", "file": f"{folder}/{file}", "place": "start"} for file in files]
        return samples(tmp_path / folder.strip("/"), *rejects)

    here = chosen("/here")
    assert len(here) == SAMPLES
    assert here == chosen("/elsewhere")
    assert not any("/here" in json.dumps(one) for one in here)
