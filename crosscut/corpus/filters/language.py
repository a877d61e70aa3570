"""Keep documents in chosen languages.

The language is detected in three passages of each document: the beginning, the middle and the end. A book therefore
takes no more time than a few pages. Detectors are unreliable on mixed languages, so each passage is examined
separately, and a notice in another language at the beginning does not determine the result. The language of a document
is the most frequent language of its passages. The score of a document is the sum of the scores of its passages in that
language, divided by the number of all its passages. A text in which the detector finds no language, such as a table of
numbers, has the language `und` with score 0 and is dropped. The language of a very short text is often detected
wrongly, but the length filter drops short documents anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pyarrow as pa

from crosscut.config.checks import listed
from crosscut.config.corpora import LanguageConfig
from crosscut.config.errors import ConfigError, DataError
from crosscut.config.system.extras import install_command
from crosscut.corpus.documents import Document, Drop, Judgement

PASSAGE = 1000
"""Length of a passage in characters. The detector eldc reads at most this number of bytes."""

UNDETERMINED = "und"
"""Code for a text without a recognisable language."""


class Detected(NamedTuple):
    """Result of a detector for a text."""

    language: str
    """ISO 639-1 code, or `und`."""

    score: float
    """Confidence of the detector, from 0 to 1. Scores of different detectors are not comparable."""


class Detector(NamedTuple):
    """A language detector."""

    detect: Callable[[str], Detected]
    languages: frozenset[str]
    """Codes of the languages that the detector knows."""


class LanguageFilter:
    """Filter that keeps documents in chosen languages.

    Dropped documents get the rule `language`. All documents get the measurements `language` and `score`. The
    constructor checks the config before a run: it raises `DataError` if the detector is not installed, and
    `ConfigError` if the detector does not know a language to keep.
    """

    def __init__(self, config: LanguageConfig) -> None:
        self._config = config
        if config.keep:
            self._detector = _DETECTORS[config.detector]()
            unknown = sorted(set(config.keep) - self._detector.languages)
            if unknown:
                known = ", ".join(sorted(self._detector.languages))
                raise ConfigError(
                    f"`language.keep` must hold codes of languages that {config.detector} knows ({known}), but has "
                    f"{listed(f'`{code}`' for code in unknown)}. Correct the code, or choose another "
                    "`language.detector`."
                )

    def __call__(self, documents: Sequence[Document]) -> Judgement:
        """Drop documents in other languages or with a low score. If `keep` is empty, no document is dropped or
        measured.
        """
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
    """Select the passages for the detector: all of a short text, or the beginning, middle and end of a long text."""
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


def _imported(package: str, *, extra: str) -> ModuleType:
    try:
        return import_module(package)
    except ImportError:
        raise DataError(
            f'`language.detector` "{package}" needs the package {package}, but {package} is not installed. Run '
            f"`{install_command(extra)}`."
        ) from None


@cache
def _eldc() -> Detector:
    eldc = _imported("eldc", extra="corpus")
    eldc.init()
    detector = eldc.instance()
    detector.set_scores(1)

    def detect(text: str) -> Detected:
        result = detector.detect_details(text.replace("\0", " "))  # a zero byte would end the text in C
        return Detected(result.language, result.scores.get(result.language, 0.0))

    return Detector(detect, frozenset(eldc.LANGUAGES))


@cache
def _langdetect() -> Detector:
    langdetect = _imported("langdetect", extra="langdetect")
    # langdetect adds up scores in the order in which it loads the profiles. Sorted files always give the same rounding.
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
    """Shorten a code to the language: `zh-cn` and `zh-tw` become `zh`."""
    return code.partition("-")[0]


_DETECTORS = {"eldc": _eldc, "langdetect": _langdetect}
