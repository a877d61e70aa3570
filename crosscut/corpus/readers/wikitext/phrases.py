"""Render templates of words: foreign words, names in other scripts, ships, quotations and lists."""

from crosscut.corpus.readers.wikitext.markup import Renderer, TemplateCall

_LANGUAGES = (
    "af Afrikaans, am Amharic, ar Arabic, arz Egyptian Arabic, az Azerbaijani, be Belarusian, ber Berber, bg "
    "Bulgarian, bn Bengali, bo Tibetan, br Breton, bs Bosnian, ca Catalan, cs Czech, cy Welsh, da Danish, de German, "
    "el Greek, en English, eo Esperanto, es Spanish, et Estonian, eu Basque, fa Persian, fi Finnish, fo Faroese, fr "
    "French, fro Old French, frk Frankish, fy West Frisian, ga Irish, gd Scottish Gaelic, gl Galician, gem Germanic, "
    "got Gothic, grc Ancient Greek, grc-gre Greek, gu Gujarati, haw Hawaiian, he Hebrew, hi Hindi, hr Croatian, hu "
    "Hungarian, hy Armenian, id Indonesian, is Icelandic, it Italian, ja Japanese, jv Javanese, ka Georgian, kk "
    "Kazakh, km Khmer, kn Kannada, ko Korean, ku Kurdish, la Latin, lad Judaeo-Spanish, lb Luxembourgish, lt "
    "Lithuanian, lv Latvian, mi Māori, mk Macedonian, ml Malayalam, mn Mongolian, mr Marathi, ms Malay, mt Maltese, "
    "my Burmese, nah Nahuatl, nb Norwegian Bokmål, nci Classical Nahuatl, ne Nepali, nl Dutch, nn Norwegian Nynorsk, "
    "no Norwegian, oc Occitan, ang Old English, enm Middle English, non Old Norse, ota Ottoman Turkish, pa Punjabi, "
    "pi Pali, pl Polish, ps Pashto, pt Portuguese, qu Quechua, ro Romanian, ru Russian, rus Russian, sa Sanskrit, scn "
    "Sicilian, sco Scots, sd Sindhi, sh Serbo-Croatian, si Sinhala, sk Slovak, sl Slovene, so Somali, sq Albanian, sr "
    "Serbian, sr-cyr Serbian Cyrillic, su Sundanese, sv Swedish, sw Swahili, ta Tamil, te Telugu, tg Tajik, th Thai, "
    "tk Turkmen, tl Tagalog, tr Turkish, tt Tatar, uk Ukrainian, ur Urdu, uz Uzbek, vi Vietnamese, xh Xhosa, yi "
    "Yiddish, yo Yoruba, zh Chinese, zu Zulu"
)
"""English names of languages, which the templates Lang-xx and Langx write before foreign words."""

LANGUAGES = dict(entry.split(" ", 1) for entry in _LANGUAGES.split(", "))

_CHINESE = (
    ("c", "Chinese"),
    ("s", "simplified Chinese"),
    ("t", "traditional Chinese"),
    ("p", "pinyin"),
    ("tp", "Tongyong Pinyin"),
    ("w", "Wade–Giles"),
    ("j", "Jyutping"),
    ("cy", "Cantonese Yale"),
    ("poj", "Pe̍h-ōe-jī"),
    ("l", "lit."),
    ("lit", "lit."),
)
_KOREAN = (("hangul", "Korean"), ("hanja", "Hanja"), ("rr", "RR"), ("mr", "MR"))


def argument(*keys: int | str) -> Renderer:
    """Make a renderer that shows the first of the given arguments that is not empty."""
    return lambda call: call.first(*keys)


def last(call: TemplateCall) -> str:
    """Show the last argument without a name."""
    parts = [part for part in call.numbered() if part]
    return parts[-1] if parts else ""


def literal(text: str) -> Renderer:
    """Make a renderer that shows the same text everywhere."""
    return lambda call: text  # noqa: ARG005 - the arguments choose nothing


def enclosed(before: str, after: str, *keys: int | str) -> Renderer:
    """Make a renderer that puts an argument, the first one by default, between two texts."""

    def render(call: TemplateCall) -> str:
        text = call.first(*(keys or (1,)))
        return f"{before}{text}{after}" if text else ""

    return render


def joined(separator: str) -> Renderer:
    """Make a renderer that joins all arguments without names."""
    return lambda call: separator.join(part for part in call.numbered() if part)


def paragraph(*keys: int | str) -> Renderer:
    """Make a renderer that shows an argument, such as the text of a quotation, as a paragraph of its own."""

    def render(call: TemplateCall) -> str:
        text = call.first(*keys)
        return f"\n\n{text}\n\n" if text else ""

    return render


def labelled(code: str, text: str, call: TemplateCall) -> str:
    """Write foreign words after the name of their language, as in "German: Wort"."""
    name = LANGUAGES.get(code, "")
    label = call["label"].lower() not in ("none", "no", "-")
    is_named = bool(name) and call.wiki.is_english and label and not call["links"].startswith("hide")
    meaning = call.first("lit", "translation", 3 if call.name == "langx" else "")
    shown = f"{name}: {text}" if is_named else text
    return f"{shown}, lit. '{meaning}'" if meaning and text else shown if text else ""


def language_of_name(call: TemplateCall) -> str:
    """Render {{lang-de|Wort}}."""
    return labelled(call.name.removeprefix("lang-"), call.first(1, "text"), call)


def language_of_argument(call: TemplateCall) -> str:
    """Render {{langx|de|Wort}}."""
    return labelled(call[1], call.first(2, "text"), call)


def labelled_by(label: str) -> Renderer:
    """Make a renderer that writes a label, such as "englisch" in the German Wikipedia, in front of foreign words."""
    return enclosed(f"{label} ", "", 1, "text")


def japanese(call: TemplateCall) -> str:
    """Render {{nihongo|Aikido|合気道|Aikidō|extra|extra2}} as "Aikido (合気道, Aikidō, extra) extra2"."""
    english, kanji, romaji, extra, extra2 = (call[number] for number in range(1, 6))
    extra, extra2 = extra or call["extra"], extra2 or call["extra2"]
    if call.is_on("lead"):
        kanji, romaji = f"Japanese: {kanji}" if kanji else "", f"Hepburn: {romaji}" if romaji else ""
    words = [english, kanji, romaji, extra]
    first = next((word for word in words if word), "")
    inner = [word for word in words[words.index(first) + 1 :] if word] if first else []
    shown = f"{first} ({', '.join(inner)})" if inner else first
    return f"{shown} {extra2}".strip()


def japanese_first(call: TemplateCall) -> str:
    """Render {{nihongo3|English|漢字|rōmaji}}, which shows the transcription first."""
    inner = ", ".join(word for word in (call[2], call[1], call[4]) if word)
    return f"{call[3]} ({inner})" if call[3] and inner else call[3] or inner


def scripts(labels: tuple[tuple[str, str], ...], join: str = "; ") -> Renderer:
    """Make a renderer for a word in several scripts, such as {{zh|s=学|t=學|p=xué}}."""

    def render(call: TemplateCall) -> str:
        is_labelled = call["labels"].lower() != "no"
        words = [(label, call[key]) for key, label in labels if call[key]]
        return join.join(f"{label}: {word}" if is_labelled else word for label, word in words) or call[1]

    return render


chinese = scripts(_CHINESE)
korean = scripts(_KOREAN)


def ship(prefix: str) -> Renderer:
    """Make a renderer for a ship's name: {{USS|Hornet|CV-12}} becomes "USS Hornet (CV-12)".

    A third argument leaves out parts of the name.
    """

    def render(call: TemplateCall) -> str:
        name, hull, style = call[1], call[2], call[3]
        named = f"{prefix} {name}".strip()
        parts = {"1": hull, "2": named, "3": f"{name} ({hull})", "4": f"{prefix} {hull}", "5": named, "6": name}
        return parts.get(style) or (f"{named} ({hull})" if hull else named)

    return render


def any_ship(call: TemplateCall) -> str:
    """Render {{ship|HMS|Ajax|22|6}}."""
    shifted = {str(number): call[number + 1] for number in range(1, 4)}
    return ship(call[1])(TemplateCall(call.name, shifted, call.wiki, call.title))


def ship_class(call: TemplateCall) -> str:
    """Render {{sclass|Iowa|battleship}} as "Iowa-class battleship"."""
    name, kind = call[1], call[2]
    return f"{name}-class {kind}".strip() if name else ""


def phonetic(call: TemplateCall) -> str:
    """Render {{IPA|/a/}}. If the first argument is a language, the template is a pronunciation guide and is removed."""
    return call[1] if not call[2] else ""


def short_author(call: TemplateCall) -> str:
    """Render {{harvtxt|Smith|Jones|2000|p=5}} as "Smith & Jones (2000, p. 5)"."""
    *names, year = call.numbered() or [""]
    page = call.first("p", "pp", "loc")
    mark = "" if not page or call["loc"] else "p. " if call["p"] else "pp. "
    shown = ", ".join(names[:-1]) + (" & " if names[:-1] else "") + names[-1] if names else ""
    return f"{shown} ({year}{f', {mark}{page}' if page else ''})" if shown else ""


def verse(call: TemplateCall) -> str:
    """Render {{bibleverse|Mark|3:25}} and {{bibleverse|1|John|2:3}}."""
    parts = call.numbered()
    end = 3 if parts[:1] and parts[0] in ("1", "2", "3", "4", "I", "II", "III") else 2
    return " ".join(part for part in parts[:end] if part)


def accidental(call: TemplateCall) -> str:
    """Render {{music|flat}}."""
    return {"flat": "♭", "b": "♭", "sharp": "♯", "#": "♯", "natural": "♮"}.get(call[1].lower(), call[1])


def century(word: str) -> Renderer:
    """Make a renderer for {{s|XIX|e}}, a century in French. The arguments may name a second century."""

    def render(call: TemplateCall) -> str:
        parts = call.numbered()[:5]
        numbers = [f"{number}{end} {word}".strip() for number, end in zip(parts[::3], parts[1::3], strict=False)]
        between = f" {parts[2]} " if len(parts) > 2 else ", "
        era = " av. J.-C." if call.name == "-s" else ""
        return between.join(numbers) + era

    return render


def reading(call: TemplateCall) -> str:
    """Render {{読み仮名|漢字|かんじ}}: a word with its reading in brackets."""
    return f"{call[1]}（{call[2]}）" if call[2] else call[1]


def page_title(call: TemplateCall) -> str:
    """Render {{PAGENAME}}."""
    return call.title


def upper(call: TemplateCall) -> str:
    """Render {{uc:text}}."""
    return call[1].upper()


def lower(call: TemplateCall) -> str:
    """Render {{lc:text}}."""
    return call[1].lower()


def upper_first(call: TemplateCall) -> str:
    """Render {{ucfirst:text}}."""
    return call[1][:1].upper() + call[1][1:]


def lower_first(call: TemplateCall) -> str:
    """Render {{lcfirst:Text}}."""
    return call[1][:1].lower() + call[1][1:]


def branch(call: TemplateCall) -> str:
    """Render {{#if:condition|then|else}}."""
    return call[2] if call[1] else call[3]
