"""Which languages stay, told from three passages of each document.

A passage is taken at the beginning, in the middle and at the end, and each is told by itself, since detectors make
nothing sure of a mixture: so a notice in another language at the top decides nothing, and a book takes no longer than
a page. The document is of the language that most of its passages have; its score is theirs, of all three. A text in
which the detector finds no language, such as a table of numbers, is of the language `und` with score 0, and goes. A
few words are judged as they are, and often wrongly: the filter on length is what such documents fall to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from crosscut.config.checks import listed
from crosscut.config.corpus import LanguageConfig
from crosscut.config.errors import ConfigError, DataError
from crosscut.corpus.documents import Document, Drop, Judgement

PASSAGE = 1000
"""Characters of a passage; eldc looks at no more than so many bytes."""

UNDETERMINED = "und"
"""The language of a text that has none."""


class Detected(NamedTuple):
    """What a detector says of a text."""

    language: str
    """ISO 639-1 code, or `und`."""

    score: float
    """How certain it is, 0 to 1, in the detector's own measure."""


class Detector(NamedTuple):
    """A way to tell languages."""

    detect: Callable[[str], Detected]
    languages: frozenset[str]
    """Codes that it knows."""


class LanguageFilter:
    """Keeps documents in some languages: rule `language`, marks `language` and `score`.

    Raises `DataError` where the detector is not installed and `ConfigError` where it does not know a language to keep:
    making one is the check before a run.
    """

    def __init__(self, config: LanguageConfig) -> None:
        self._config = config
        if config.keep:
            self._detector = _DETECTORS[config.detector]()
            unknown = sorted(set(config.keep) - self._detector.languages)
            if unknown:
                known = ", ".join(sorted(self._detector.languages))
                raise ConfigError(
                    f"`language.keep` must hold languages that {config.detector} knows ({known}), but has "
                    f"{listed(f'`{code}`' for code in unknown)}."
                )

    def __call__(self, documents: Sequence[Document]) -> Judgement:
        """The documents in other languages, or too uncertain; none, and no marks, where all languages are kept."""
        if not self._config.keep:
            return Judgement()
        found = [_told(document.text, self._detector) for document in documents]
        drops = [
            Drop(document.row, "language", f"{language} {score:.2f}")
            for document, (language, score) in zip(documents, found, strict=True)
            if language not in self._config.keep or score < self._config.min_score
        ]
        marks = {
            "language": pa.array([one.language for one in found], pa.string()),
            "score": pa.array([one.score for one in found], pa.float32()),
        }
        return Judgement(drops, marks)


def passages(text: str) -> list[str]:
    """What a detector looks at: a short text whole, of a longer one the beginning, the middle and the end."""
    if len(text) <= PASSAGE:
        return [text]
    rest = len(text) - PASSAGE
    return [text[start : start + PASSAGE] for start in (0, rest // 2, rest)]


def _told(text: str, detector: Detector) -> Detected:
    found = [detector.detect(passage) for passage in passages(text)]
    scores: dict[str, float] = {}
    for language, score in found:
        scores[language] = scores.get(language, 0.0) + score / len(found)
    counts = Counter(one.language for one in found)
    language = max(scores, key=lambda code: (counts[code], scores[code]))
    return Detected(language, scores[language])


@cache
def _eldc() -> Detector:
    try:
        import eldc
    except ImportError:
        raise DataError(
            '`language.detector` "eldc" needs the package eldc, but it is not installed. Type `pip install '
            "'crosscut[corpus]'`."
        ) from None
    eldc.init()
    detector = eldc.instance()
    detector.set_scores(1)

    def detect(text: str) -> Detected:
        result = detector.detect_details(text.replace("\0", " "))  # which ends a text in C
        return Detected(result.language, result.scores.get(result.language, 0.0))

    return Detector(detect, frozenset(eldc.LANGUAGES))


@cache
def _langdetect() -> Detector:
    try:
        import langdetect
    except ImportError:
        raise DataError(
            '`language.detector` "langdetect" needs the package langdetect, but it is not installed. Type `pip install '
            "'crosscut[langdetect]'`."
        ) from None
    # Its own way to load them takes the order of the folder, which sums of scores would show.
    factory = langdetect.DetectorFactory()
    profiles = sorted(path for path in Path(langdetect.PROFILES_DIRECTORY).iterdir() if path.is_file())
    factory.load_json_profile([path.read_text(encoding="utf-8") for path in profiles])
    factory.set_seed(0)

    def detect(text: str) -> Detected:
        detector = factory.create()
        detector.append(text)
        try:
            best = detector.get_probabilities()[:1]
        except langdetect.LangDetectException:  # no letter of any language
            best = []
        return Detected(_short(best[0].lang), best[0].prob) if best else Detected(UNDETERMINED, 0.0)

    return Detector(detect, frozenset(_short(code) for code in factory.get_lang_list()))


def _short(code: str) -> str:
    """`zh-cn` and `zh-tw` are both `zh`."""
    return code.partition("-")[0]


_DETECTORS = {"eldc": _eldc, "langdetect": _langdetect}
