"""Findings: violations of the rules that must hold for every case. Each cause has one finding, with everything that
reproduces it.
"""

import json
import re
import shlex
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fuzzing.cases import Case
from benchmarks.fuzzing.sandbox import LONGEST, MEMORY_BYTES, Outcome, frames_in, place_in

CLASSES = {
    "traceback": "an exception reached the user",
    "hang": f"no end within {LONGEST:.0f} s",
    "slow": "more processor time than the file's size allows",
    "memory": f"more than {MEMORY_BYTES >> 20:,} MiB above the idle process, or more than the file's size allows",
    "raw": "a control character reached the terminal",
    "status": "an exit status (or an HTTP status) that is not documented, or an answer that is not JSON",
    "crash": "a signal ended the process",
    "accepted": "a damaged input was accepted",
    "unfair": "an honest request was not answered in time, or not as before",
}
"""Classes of findings."""

_OWN = re.compile(rb"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[\d*A|\x1b\[2K|\r")
"""Escapes that Crosscut's tables and progress bars send to a terminal with colours."""
_OWN_ANYWHERE = re.compile(rb"\x1b\[[012]m|\r\n")
"""Escapes that Crosscut sends to any terminal: bold, dim and plain. No hostile word has them."""
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_MOST_KEPT = 16 << 20


@dataclass
class Finding:
    """One cause of failures."""

    kind: str
    failure: str
    """A key of `CLASSES`."""
    place: str
    """Innermost place in the package, or the command if there is no stack."""
    detail: str
    case: Case
    """The smallest case found."""
    seed: int = 0
    count: int = 1
    reproduction: str = ""
    trace: str = ""
    output: bytes = field(default=b"", repr=False)

    @property
    def key(self) -> tuple[str, str, str]:
        """Findings with the same key have the same cause."""
        return self.kind, self.failure, self.place

    def to_json(self) -> dict[str, Any]:
        """Return the fields as values for JSON."""
        fields = asdict(self) | {"case": self.case.to_json(), "name": f"{self.seed}/{self.kind}/{self.case.number}"}
        del fields["output"]
        return fields


def judge(outcome: Outcome, statuses: tuple[int, ...], terminal: str) -> list[tuple[str, str, str]]:
    """Failures of one case, each as class, place and detail."""
    found = []
    text = outcome.output.decode(errors="replace")
    if outcome.hung:
        found.append(("hang", outcome.place, f"no end after {outcome.seconds:.1f} s"))
    elif outcome.ended_by:
        found.append(("crash", outcome.ended_by, f"ended by {outcome.ended_by}"))
    elif "MemoryError" in outcome.error or "can't allocate memory" in outcome.error or "not enough memory" in text:
        found.append(("memory", outcome.place or place_in(frames_in(text)), outcome.error or "allocation fails"))
    elif outcome.error:
        found.append(("traceback", outcome.place, outcome.error))
    elif error := error_in(text):
        found.append(("traceback", place_in(frames_in(text)), error))
    elif outcome.status not in statuses:
        found.append(("status", "", f"exit status {outcome.status}"))
    if outcome.peak > MEMORY_BYTES and not any(failure == "memory" for failure, *_ in found):
        found.append(("memory", outcome.place, f"peak {outcome.peak >> 20:,} MiB above the idle process"))
    if raw := raw_in(outcome.output, terminal):
        found.append(("raw", "", raw))
    return found


def error_in(text: str) -> str:
    """Last line of a traceback in an output; empty without a traceback."""
    if "Traceback (most recent call last)" not in text:
        return ""
    return next(line for line in reversed(text.splitlines()) if line and not line.startswith((" ", "\t")))[:300]


def raw_in(output: bytes, terminal: str) -> str:
    """The first control character that must not reach a terminal, with its surroundings."""
    own = (_OWN_ANYWHERE if terminal == "dumb" else _OWN).sub(b"", output)
    text = own.decode(errors="replace")
    if found := _CONTROL.search(text):
        return repr(text[max(0, found.start() - 40) : found.start() + 20])
    return ""


def keep(folder: Path, finding: Finding, inputs: Path | None) -> Path:
    """Write everything that reproduces a finding to a folder of its own, and return the folder."""
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(finding.key).lower()).strip("-")[:120]
    place = folder / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "case.json").write_text(json.dumps(finding.case.to_json(), indent=1) + "\n")
    (place / "finding.json").write_text(json.dumps(finding.to_json(), indent=1) + "\n")
    (place / "output").write_bytes(finding.output)
    (place / "trace.txt").write_text(finding.trace, errors="backslashreplace")
    (place / "reproduce.sh").write_text(f"cd inputs\n{finding.reproduction}\n", errors="surrogateescape")
    if inputs is not None and inputs.is_dir():
        shutil.copytree(inputs, place / "inputs", symlinks=True, ignore=_too_large)
        for edit in finding.case.edits:
            if edit.action in ("fifo", "sparse"):
                with (place / "reproduce.sh").open("a") as file:
                    file.write(f"# {edit.file} must be a {edit.action} file; it is not copied.\n")
    return place


def _too_large(folder: str, names: list[str]) -> list[str]:
    paths = [Path(folder) / name for name in names]
    return [path.name for path in paths if path.is_fifo() or (path.is_file() and path.stat().st_size > _MOST_KEPT)]


def command_line(arguments: tuple[str, ...]) -> str:
    """The command as typed in a shell. Long arguments are shortened: `case.json` has them all."""
    words = [shlex.quote(word) if word.isprintable() else _ansi_quoted(word) for word in arguments]
    return " ".join(["crosscut", *(word if len(word) < 200 else f"{word[:80]}...({len(word):,})" for word in words)])


def _ansi_quoted(word: str) -> str:
    escaped = "".join(chr(one) if 32 <= one < 127 and one not in b"'\\" else f"\\x{one:02x}"
                      for one in word.encode("utf-8", "surrogateescape"))  # fmt: skip
    return f"$'{escaped}'"
