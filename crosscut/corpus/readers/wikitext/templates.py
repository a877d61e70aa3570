"""The templates that carry words of a sentence, each with the function that renders it or the text that it writes.

All other templates are removed. Names are written in lower case and separated by bars. `COMMON` applies to all wikis.
`VARIANTS` has the templates of each language, which take precedence. The templates were chosen by their frequency
within sentences, which `benchmarks/corpus/wikipedia.py --templates` counts.
"""

from functools import cache

from crosscut.corpus.readers.wikitext import dates, phrases, quantities
from crosscut.corpus.readers.wikitext.convert import convert
from crosscut.corpus.readers.wikitext.markup import Renderer
from crosscut.corpus.readers.wikitext.phrases import argument, enclosed, joined, labelled_by, literal, paragraph, ship
from crosscut.corpus.readers.wikitext.quantities import currency, quantity

COMMON: dict[str, Renderer | str] = {
    # quantities
    "convert | cvt | convertir | converti": convert,
    "val": quantities.value,
    "frac | fraction | sfrac | tfrac | bruch": quantities.fraction,
    "chem | fchim": quantities.formula,
    "chem2": quantities.formula_in_line,
    "formatnum: | formatnum | nts | number": quantities.format_number,
    "e": quantities.exponent,
    "us$ | usd": currency("US$"),
    "gbp | £": currency("£"),
    "euro | eur | €": currency("€"),
    "inr | indian rupee | ₹": currency("₹"),
    "jpy | cny | ¥": currency("¥"),
    "au$ | a$ | aud": currency("A$"),
    "ca$ | c$ | cad": currency("C$"),
    "railgauge | track gauge": argument(1),
    "± | pm": enclosed("±", ""),
    "sup | exp": enclosed("<sup>", "</sup>"),
    "sub | ind": enclosed("<sub>", "</sub>"),
    # mathematics
    "math | mvar | bigmath | big math | var | overline": argument(1),
    "pi": "π",
    "tau": "τ",
    "phi": "φ",
    "sqrt | radic": enclosed("√", ""),
    "abs": enclosed("&#124;", "&#124;"),
    "times": "×",
    "minus": "−",
    "infin | infinity": "∞",
    "bra": enclosed("⟨", "&#124;"),
    "ket": enclosed("&#124;", "⟩"),
    # dates
    "birth date | birth date and age | birth-date | birth-date and age | birth year and age | bda | dob | death date | "
    "death-date | start date | start-date | start date and age | end date | end-date | dts": dates.single_date,
    "death date and age | death-date and age | dda": dates.death_date_and_age,
    "death year and age": dates.year_span,
    "film date": dates.film_dates,
    "age": dates.age,
    "as of": dates.as_of,
    "circa | c. | ca. | ca": dates.about("c."),
    "floruit | fl. | fl": dates.about("fl."),
    "reign | r.": dates.period("r."),
    "oldstyledate | oldstyledatedy": dates.old_style,
    # foreign words and other scripts
    "lang | langue | wikt-lang | rtl-lang": argument(2, "text", "texte", "texto", 1),
    "langx": phrases.language_of_argument,
    "transl | translit | transliteration | tlit | script": phrases.last,
    "nihongo | nihongo krt": phrases.japanese,
    "nihongo3": phrases.japanese_first,
    "nihongo2 | nihongo foot": argument(1),
    "zh | lang-zh": phrases.chinese,
    "korean | lang-ko": phrases.korean,
    "ipa": phrases.phonetic,
    "ipalink": argument(1),
    "ipablink": enclosed("[", "]"),
    "ipaslink": enclosed("/", "/"),
    "angbr | angbr ipa | angle bracket | grapheme": enclosed("⟨", "⟩"),
    "linktext": joined(""),
    "unicode | polytonic | hebrew | arabic | grc | nastaliq | runic | script/hebrew | script/arabic": argument(1),
    "native name | native phrase": argument(2, 1),
    "gloss": enclosed("'", "'"),
    "lit | literal translation": enclosed("lit. '", "'"),
    "music": phrases.accidental,
    # links and names
    "ill | illm | ill2 | interlanguage link | interlanguage link multi | link-interwiki": argument(
        "lt", "display", "texte", "text", 1
    ),
    "harvtxt | harvcoltxt": phrases.short_author,
    "bibleverse | bibleref | bibleref2 | bverse": phrases.verse,
    "visible anchor | vanchor": argument(1),
    "section link | slink": enclosed("§ ", "", 2, 1),
    "uss": ship("USS"),
    "hms": ship("HMS"),
    "hmas": ship("HMAS"),
    "hmcs": ship("HMCS"),
    "rms": ship("RMS"),
    "ss": ship("SS"),
    "mv": ship("MV"),
    "sms": ship("SMS"),
    "usns": ship("USNS"),
    "ship": phrases.any_ship,
    "sclass | sclass2 | sclass-": phrases.ship_class,
    "flag | flagcountry | flagu": argument(1),
    "audio": argument(2),
    # ways to write text
    "nowrap | nobr | nobreak | small | smaller | big | bigger | large | larger | huge | midsize | sc | smallcaps | "
    "small caps | aut | mono | code | kbd | samp | tt | em | strong | nobold | noitalic | no italic | no italics | "
    "center | key | keypress | key press | button | strikethrough | underline | block indent | vr | 1x | "
    "sic | not a typo | proper name | citation needed span | clarify span": argument(1, "text", "content"),
    "abbr | abbrlink | tooltip": argument(1),
    "color | colour | font color | resize": argument(2, "text", 1),
    "hlist | flatlist | ubl | unbulleted list | plainlist": joined(", "),
    "quote | blockquote | block quote | quotation | cquote | poemquote | verse translation": paragraph(
        1, "text", "quote", "content"
    ),
    # characters
    "nbsp | space | spaces | thinsp | thin space | hair space | hairsp | gap | indent | 0 | pad | br | crlf": " ",
    "snd | snds | spnd | spaced ndash | spaced en dash | dash": " – ",
    "ndash | en dash | –": "–",
    "mdash | em dash | —": "—",
    "spaced mdash | spaced em dash | mdashb": " — ",
    "· | dot | middot": " · ",
    "• | bull | bullet": " • ",
    "' | ` | -'": "'",
    "'s": "'s",
    "'\" | ' \" | '-\"": "'\"",
    "\"' | \" ' | \"-'": "\"'",
    '-"': '"',
    "!": "&#124;",
    "=": "=",
    "*": "*",
    "(( | (": "{",
    ")) | )": "}",
    "extinct | dagger": "†",
    # functions of MediaWiki
    "pagename | pagename: | fullpagename | basepagename": phrases.page_title,
    "lc:": phrases.lower,
    "lcfirst:": phrases.lower_first,
    "uc:": phrases.upper,
    "ucfirst:": phrases.upper_first,
    "#if:": phrases.branch,
}
"""Renderers of templates that the wikis share, or the text that a template always writes, keyed by the names of the
templates. Most names come from the English
Wikipedia, because other wikis copy its templates under the same names."""

VARIANTS: dict[str, dict[str, Renderer | str]] = {
    "de": {
        '"': enclosed("„", "“"),
        "zitat | zitat-de": paragraph(1, "text"),
        "höhe": enclosed("", " m"),
        "§": enclosed("§ ", ""),
        "ens": labelled_by("englisch"),
        "frs": labelled_by("französisch"),
        "las": labelled_by("lateinisch"),
        "its": labelled_by("italienisch"),
        "ess": labelled_by("spanisch"),
        "rus": labelled_by("russisch"),
        "pls": labelled_by("polnisch"),
        "grcs": labelled_by("altgriechisch"),
        "els": labelled_by("griechisch"),
        "ars": labelled_by("arabisch"),
        "bibel": phrases.verse,
        "schiff": argument(1),
    },
    "fr": {
        "unité | unité/2 | nombre | nb | mesure | tmp": quantity(),
        "date | date- | date de naissance | date de décès | naissance | décès": dates.day_month_year,
        "s | siècle | -s": phrases.century("siècle"),
        "s- | s mini-": phrases.century(""),
        'citation | " | guil | citation étrangère': enclosed("« ", " »", 2, 1),
        "citation bloc | citation étrangère bloc | début citation bloc": paragraph(1),
        "lien": argument("texte", "fr", "trad", 1),
        "ier | 1er": "1er",
        "er | ère | e | ème | re | nd | nde": enclosed("", "", 1),
        "n° | numéro": enclosed("no ", ""),
        "av jc | avjc | -jc": "av. J.-C.",
        "apr jc | ap jc": "apr. J.-C.",
        "heure": joined(" h "),
        "rom | rom-maj | romd | c. | pc | petites capitales": argument(1),
        "abréviation | abréviation discrète | abrd | abr": argument(1),
        "refnec | référence nécessaire | référence souhaitée | pas clair | passage évasif": argument(1),
        "incise": enclosed("– ", " –"),
        "m. | mr": "M. ",
        "mme": "Mme ",
        "mlle": "Mlle ",
        "dr": "Dr ",
        "p.": enclosed("p. ", ""),
        "japonais": phrases.japanese,
        "souverain2 | souverain3 | souverain- | souverain": argument(1),
    },
    "es": {
        "unidad": quantity(),
        "siglo": enclosed("siglo ", ""),
        "fecha | fecha de inicio | fecha de nacimiento": dates.day_month_year,
        "esd | versalita": argument(1),
        "cita | cita larga": paragraph(1),
        "cita requerida | demostrar": argument(1),
        "ac | a. c. | adc | a.c.": "a. C.",
        "dc | d. c. | d.c.": "d. C.",
        "enlace interlengua | ill-wd2": argument(1),
    },
    "ru": {
        "num | число | unité": quantity(),
        "дата": dates.day_month_year,
        "s | s. | nobr | comment | abbr | прозрачный | мелкий | small": argument(1),
        "нп | нп1 | нп2 | нп3 | нп4 | нп5 | не переведено | не переведено 5 | нп 5": argument(2, 1),
        "цитата | начало цитаты": paragraph(1, "текст"),
        "lang-en | lang-en2": labelled_by("англ."),
        "lang-de | lang-de2": labelled_by("нем."),
        "lang-fr | lang-fr2": labelled_by("фр."),
        "lang-la | lang-la2": labelled_by("лат."),
        "lang-it": labelled_by("итал."),
        "lang-es": labelled_by("исп."),
        "lang-uk": labelled_by("укр."),
        "lang-be": labelled_by("белор."),
        "lang-grc": labelled_by("др.-греч."),
        "lang-pl": labelled_by("польск."),
        "lang-ar": labelled_by("араб."),
        "lang-ja": labelled_by("яп."),
        "lang-zh": labelled_by("кит."),
        "флагификация | флаг россии": argument(1),
        "указание | нет аи 2": argument(1),
    },
    "it": {
        "m": quantity(unit="u"),
        "citazione | quote": paragraph(1, "testo"),
        "citazione necessaria | senza fonte": argument(1),
        "maiuscoletto | tutto attaccato": argument(1),
        "a.c.": "a.C.",
        "d.c.": "d.C.",
    },
    "pt": {
        "fmtn | unid": quantity(),
        "dtlink | data": dates.day_month_year,
        "séc | século": enclosed("século ", ""),
        "citação": paragraph(1),
        "lknb | carece de fontes2": argument(1),
        "ilc": argument(1),
    },
    "pl": {
        "j | w": argument(1),
        "cytat": paragraph(1),
        "fakt": argument(1),
        "kapitaliki": argument(1),
    },
    "nl": {
        "citaat": paragraph(1),
        "nbs": " ",
    },
    "ja": {
        "読み仮名 | 読み仮名 ruby不使用 | ruby | ルビ": phrases.reading,
        "仮リンク": argument("label", 1),
        "補助漢字フォント | jis2004フォント | jis90フォント | cjk | 要出典範囲": argument(1),
        "lang-en | lang-en-short": labelled_by("英"),
        "lang-fr | lang-fr-short": labelled_by("仏"),
        "lang-de | lang-de-short": labelled_by("独"),
        "lang-zh | lang-zh-short": labelled_by("中"),
        "lang-ko | lang-ko-short": labelled_by("朝"),
        "lang-it | lang-it-short": labelled_by("伊"),
        "lang-ru | lang-ru-short": labelled_by("露"),
        "lang-la": labelled_by("羅"),
    },
    "zh": {
        "tsl": argument(4, 3),
        "le | link-en | link-ja | link-de | link-fr | internal link helper": argument(3, 1),
        "lang-en": labelled_by("英语"),
        "lang-fr": labelled_by("法语"),
        "lang-de": labelled_by("德语"),
        "lang-ja": labelled_by("日语"),
        "lang-ru": labelled_by("俄语"),
        "lang-ko": labelled_by("韩语"),
        "lang-la": labelled_by("拉丁语"),
        "lang-es": labelled_by("西班牙语"),
        "lang-it": labelled_by("意大利语"),
    },
}
"""Renderers of templates that exist only in one language, or that have another meaning there, keyed by language."""


def find_renderer(name: str, language: str) -> Renderer | None:
    """Find the renderer of a template by its name in lower case. Returns None if the template is to be removed."""
    found = _by_name(language).get(name)
    if found is None and name.startswith("lang-"):
        return phrases.language_of_name
    return found


@cache
def _by_name(language: str) -> dict[str, Renderer]:
    """Renderers by name, for the wikis in a language."""
    tables = (COMMON, VARIANTS.get(language, {}))
    rows = (row for table in tables for row in table.items())
    renderers = ((names, literal(found) if isinstance(found, str) else found) for names, found in rows)
    return {name: renderer for names, renderer in renderers for name in names.split(" | ")}
