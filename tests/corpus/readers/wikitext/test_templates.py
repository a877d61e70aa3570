"""Templates that carry words are rendered as the wiki shows them, and all others are removed."""

from collections import Counter

import pytest

from crosscut.corpus.readers.steps import TooComplexError
from crosscut.corpus.readers.wikitext.markup import STEPS, STEPS_PER_CHARACTER, Templates
from crosscut.corpus.readers.wikitext.prose import prose
from crosscut.corpus.readers.wikitext.templates import COMMON, VARIANTS
from crosscut.corpus.readers.wikitext.wiki import Wiki


def in_language(language: str, markup: str) -> str:
    return prose(markup, Wiki.of(language))


CONVERSIONS = {
    "2381741|km2|sqmi": "2,381,741 square kilometres (919,595 sq mi)",
    "1300|mi|km": "1,300 miles (2,100 km)",
    "5|km": "5 kilometres (3.1 mi)",
    "1|km": "1 kilometre (0.62 mi)",
    "12|km|abbr=off": "12 kilometres (7.5 miles)",
    "468|km2|sqmi|0|abbr=on": "468 km² (181 sq mi)",
    "165|m|ft|0|sp=us": "165 meters (541 ft)",
    "3.5|mi|km|1|adj=on": "3.5-mile (5.6 km)",
    "60|nmi|km|adj=on": "60-nautical-mile (110 km)",
    "10|m|ft|adj=mid|-long": "10-metre-long (33 ft)",
    "110|°F|°C|1|order=flip": "43.3 °C (110 °F)",
    "-40|C|F": "−40 °C (−40 °F)",
    "54.5|nmi|km|disp=flip": "100.9 kilometres (54.5 nmi)",
    "1049|mi|km|disp=or": "1,049 miles or 1,688 kilometres",
    "5|mi|km|disp=output only": "8.0 km",
    "5|mi|km|disp=number": "8.0",
    "10|to|30|km|mi": "10 to 30 kilometres (6.2 to 18.6 mi)",
    "15|-|17|in|mm|abbr=on": "15–17 in (380–430 mm)",
    "25|by|36|cm|in|0|abbr=on": "25 by 36 cm (10 by 14 in)",
    "60|and(-)|80|kg|lb": "60 and 80 kilograms (130–180 lb)",
    "6|ft|4|in|cm|0": "6 feet 4 inches (193 cm)",
    "6|ft|1|in|m": "6 feet 1 inch (1.85 m)",
    "10|st|5|lb|kg": "10 stone 5 pounds (66 kg)",
    "178|cm|ftin|abbr=on": "178 cm (5 ft 10 in)",
    "860|nmi|km mi|-1": "860 nautical miles (1,590 km; 990 mi)",
    "22|e6acre|km2": "22 million acres (89,000 km²)",
    "1.2|PD/sqmi": "1.2 inhabitants per square mile (0.46/km²)",
    "300|oilbbl|m3|sigfig=1": "300 barrels (50 m³)",
    "97|km/h|mph|round=5": "97 kilometres per hour (60 mph)",
    "1/2|mi|m": "1/2 mile (800 m)",
    "2+1/2|mi|km": "2 1/2 miles (4.0 km)",
    "1,234.5|kg|lb": "1,234.5 kilograms (2,722 lb)",
    "7|smoot": "7 smoot",
    "0|km|mi": "0 kilometres (0 mi)",
    "12|kg|km": "12 kilograms",
}


@pytest.mark.parametrize("arguments", CONVERSIONS)
def test_conversion_is_rounded_and_written_as_on_the_wiki(arguments: str) -> None:
    assert prose(f"{{{{convert|{arguments}}}}}") == CONVERSIONS[arguments]


def test_short_conversion_has_symbols_and_other_languages_have_their_numbers() -> None:
    assert prose("{{cvt|1300|mi|km}}") == "1,300 mi (2,100 km)"
    assert in_language("de", "{{convert|1300|mi|km}}") == "1.300 mi (2.100 km)"


ENGLISH = {
    "{{val|1.5|0.2|e=6|u=m/s}}": "1.5±0.2×10⁶ m/s",
    "{{val|1.00794|(7)|ul=u}}": "1.00794(7) u",
    "{{val|12345|+3|-2|p=~}}": "~12,345+3−2",
    "{{frac|1|2}} {{frac|3}} {{frac|4|1|2}} {{sfrac|''n'' + 1|2}}": "1/2 1/3 4 1/2 (n + 1)/2",
    "{{chem|SO|4|2-}} {{chem|C|''n''|H|2''n''}} {{chem2|H3O(+)}}": "SO4²⁻ C_nH_2n H3O⁺",
    "{{formatnum:1234567.5}} {{formatnum:1,234|R}}": "1,234,567.5 1234",
    "3{{e|24}} {{US$|5 million}} {{£|12000}} {{±|3}}": "3×10²⁴ US$5 million £12,000 ±3",
    "x{{sup|2}} H{{sub|2}}O {{math|''x'' > 0}} {{pi}}": "x² H2O x > 0 π",
    "{{birth date|1950|1|2}} {{start date|1993|02|24|df=y}} {{start date|1993|2}}": (
        "January 2, 1950 24 February 1993 February 1993"
    ),
    "{{birth date and age|2 May 1950}} {{birth year and age|1950}}": "2 May 1950 1950",
    "{{death date and age|1865|4|15|1809|4|16}}": "April 15, 1865 (aged 55)",
    "{{death year and age|1990|1920}} {{age|1990|5|1|2000|4|30}}": "1990 (aged 69–70) 9",
    "{{film date|2000|1|2|Peru|2001|3}}": "January 2, 2000 (Peru), March 2001",
    "{{as of|2014|lc=y}} {{As of|2014|3|5}} {{as of|2014|3|5|df=US|since=y}}": (
        "as of 2014 As of 5 March 2014 Since March 5, 2014"
    ),
    "{{circa|300}} {{circa|300|400}} {{floruit|120}} {{reign|10|20}}": "c. 300 c. 300 – c. 400 fl. 120 r. 10–20",
    "{{OldStyleDate|May 2|1905|April 19}}": "May 2 [O.S. April 19] 1905",
    "{{lang|fr|''mot''}} {{lang-de|Wort}} {{langx|de|Wort|lit=word}}": "mot German: Wort German: Wort, lit. 'word'",
    "{{transl|ar|ISO|kitāb}} {{lang-xyz|abc}} {{lang-de|Wort|label=none}}": "kitāb abc Wort",
    "{{nihongo|Mountain|山|yama|a hill}} {{nihongo||山|yama}}": "Mountain (山, yama, a hill) 山 (yama)",
    "{{nihongo|Mountain|山|yama|lead=yes}} {{nihongo3|Hill|山|yama}}": (
        "Mountain (Japanese: 山, Hepburn: yama) yama (山, Hill)"
    ),
    "{{zh|t=學|p=xué|s=学}} {{zh|c=山|labels=no}}": "simplified Chinese: 学; traditional Chinese: 學; pinyin: xué 山",
    "{{korean|hangul=산|hanja=山}} {{IPAlink|a}} {{angbr|a}}": "Korean: 산; Hanja: 山 a ⟨a⟩",
    "the vowel {{IPA|/a/}}": "the vowel /a/",
    "{{ill|Ada|de|Ada (Film)|lt=the film}} {{harvtxt|Roe|Doe|1990|p=5}}": "the film Roe & Doe (1990, p. 5)",
    "{{USS|Hornet|CV-12}} {{HMS|Ajax|22|6}} {{ship|SS|Gull|1902|2}}": "USS Hornet (CV-12) Ajax SS Gull",
    "{{sclass|Heron|cutter}} {{bibleverse|1|John|2:3}} {{music|flat}}": "Heron-class cutter 1 John 2:3 ♭",
    "{{nowrap|a {{small|b}}}} {{abbr|kg|kilogram}} {{color|red|c}} {{hlist|d|e}}": "a b kg c d, e",
    "a{{nbsp}}b{{snd}}c{{ndash}}d{{mdash}}e{{'}}f{{·}}g {{'s}}": "a b – c–d—e'f · g 's",
    "{{abs|x}} {{lc:ABC}} {{uc:abc}} {{#if:a|b|c}}{{#if: |b|c}}": "|x| abc ABC bc",
    "{{lc:Foo: Bar}} {{uc:a:b}} {{subst: lc:A:B:C}} {{UC:a=b}}": "foo: bar A:B a:b:c A=B",
    "{{lcfirst:Foo: Bar}} {{ucfirst:foo bar}} {{#if:a=b|c=d}} {{formatnum:1234}}": "foo: Bar Foo bar c=d 1,234",
}


@pytest.mark.parametrize("markup", ENGLISH)
def test_template_is_rendered_as_text(markup: str) -> None:
    assert prose(markup) == ENGLISH[markup]


LOCAL = {
    ("fr", "{{unité|1234,5|km}} {{unité|5|m||s|-2}} {{nombre|12000|habitants}}"): "1 234,5 km 5 m s⁻² 12 000 habitants",
    ("fr", "au {{s|XIX|e}}, du {{s-|XV|e}}, {{date|1|mai|1900}}"): "au XIXe siècle, du XVe, 1 mai 1900",
    ("fr", "{{citation|mot}} {{lang|en|word}} {{lien|langue=en|trad=Tree|texte=arbre}}"): "« mot » word arbre",
    ("de", "{{formatnum:1234.5}} {{enS|word}} {{\"|Wort}}"): "1.234,5 englisch word „Wort“",
    ("es", "{{unidad|12345|km}} {{siglo|XIX}} {{fecha|2|5|1900}}"): "12 345 km siglo XIX 2 de mayo de 1900",
    ("ru", "{{num|12345|км}} {{lang-en|word}} {{нп5|Дерево|дерево|en|Tree}} {{дата|2|5|1900}}"): (
        "12 345 км англ. word дерево 2 мая 1900"
    ),
    ("it", "{{M|1500|u=km}} {{a.C.}}"): "1.500 km a.C.",
    ("ja", "{{読み仮名|山|やま}} {{仮リンク|木|en|Tree}} {{lang-en|word}}"): "山（やま） 木 英 word",
    ("zh", "{{le|树|Tree}} {{lang-en|word}} -{zh-hans:计算机; zh-hant:電腦}-"): "树 英语 word 计算机",
    ("pl", "{{J|word}} {{formatnum:1234}}"): "word 1234",
}  # fmt: skip


@pytest.mark.parametrize(("language", "markup"), LOCAL)
def test_template_of_another_language_is_rendered(language: str, markup: str) -> None:
    assert in_language(language, markup) == LOCAL[language, markup]


def test_quotation_is_a_paragraph() -> None:
    assert prose("He said: {{quote|text=We ''went''.|author=Roe}} Then") == "He said:\n\nWe went.\n\nThen"


def test_title_of_the_page_is_known() -> None:
    assert prose("'''{{PAGENAME}}''' is", title="Ada (film)") == "Ada (film) is"


def test_unknown_templates_are_removed_with_all_that_they_hold() -> None:
    assert (
        prose("A{{Infobox|a={{lang|fr|b}}|[[c|d]]\n|e={{f|{{g}}}}}} is{{cn|date=May 2000}} here {{who}}.")
        == "A is here."
    )


def test_arguments_follow_the_rules_of_mediawiki() -> None:
    assert prose("{{lang|fr|2=deux}}") == "deux"
    assert prose("{{nowrap|1=a=b}} {{nowrap|[[c|d]] e}} {{nowrap|{{nihongo|f|g}} h}}") == "a=b d e f (g) h"
    assert prose("{{Nowrap\n| x \n}} {{ template:nowrap |y}} {{subst:nowrap|z}}") == "x y z"


def test_braces_without_a_partner_do_not_hide_text() -> None:
    assert prose("a {{nowrap|b}} c {{d e") == "a b c d e"
    assert prose("a }} b {{{1|x}}} c") == "a b c"


def test_template_inside_itself_ends_at_the_limit() -> None:
    assert prose("a" + "{{small|" * 3000 + "b" + "}}" * 3000) == "a"


@pytest.mark.parametrize("table", [COMMON, *VARIANTS.values()], ids=["common", *VARIANTS])
def test_no_template_has_two_renderers_in_a_language(table: dict[str, object]) -> None:
    names = Counter(name for names in table for name in names.split(" | "))
    assert [name for name, number in names.items() if number > 1] == []
    assert all(name == " ".join(name.lower().split()) for name in names)


def test_century_shows_each_argument_once_however_many_there_are() -> None:
    markup = "{{s|I|e|" * 12 + "et" + "|I|e|et|I|e|et|I|e}}" * 12
    assert len(in_language("fr", markup)) < 2 * len(markup)


def test_conversion_shows_a_few_units() -> None:
    assert in_language("en", "{{convert|1|km|" + "m " * 999 + "}}").count("1,000 m") == 8


def test_templates_that_double_their_text_are_refused_after_the_same_number_of_steps() -> None:
    markup = "{{a|" * 30 + "word" + "}}" * 30
    templates = Templates(markup, lambda name: lambda call: call[1] + call[1], Wiki(), "")
    with pytest.raises(TooComplexError, match=f"{STEPS + STEPS_PER_CHARACTER * len(markup):,} steps"):
        templates.render()
