"""Markup of a page that is not prose is removed, and the rest is written as text."""

import random
import time

import pytest

from crosscut.corpus.readers.wikitext.prose import prose
from crosscut.corpus.readers.wikitext.wiki import Wiki, read_words

NAMESPACES = {"Media": -2, "": 0, "Diskussion": 1, "Datei": 6, "Kategorie": 14, "Portal": 100}
GERMAN = Wiki.of("de", "https://de.example.org/wiki", NAMESPACES)

REMOVED = {  # parts that are not prose are removed
    "a<!-- b --> c": "a c",
    "a\n<!-- b -->\nc": "a\nc",
    "a <!-- never closed": "a",
    'a<ref name="b">{{c}} [[d]] <!-- e --></ref> f<ref name=g /> h<ref>i</ref>.': "a f h.",
    "a<ref>b</ref name=c>d</ref> e": "a e",
    "a <ref>b": "a b",
    "<gallery>\nFile:A.jpg|b\n</gallery>c<timeline>d</timeline><syntaxhighlight lang=x>e</syntaxhighlight>": "c",
    'a\n{| class="b"\n! c !! d\n|-\n| e || f\n{| \n| g\n|}\n|}\nh': "a\n\nh",
    "a\n{| class=b\n| c\n== d ==\ne": "a\n\nd\ne",
    "<table><tr><td>a</td></tr></table>b": "b",
    "{{Infobox|a=\n{| \n| b\n|}\n}}c": "c",
    "[[File:A.jpg|thumb|300px|A [[b]] of {{c}} [http://d.example e]]]f": "f",
    "a [[Category:B]][[category:c|d]][[fr:E]][[zh-min-nan:F]]": "a",
    "[[:Category:A]] b [[:Category:C|c]] [[:File:D.jpg|d]]": "b c d",
    "__TOC__a__NOEDITSECTION__ b __noToc__": "a b",
    "a\n----\nb": "a\nb",
    "a {{!}} b\n|- c\n! d !! e\n|f": "a | b",
}

SHOWN = {  # markup is written as text
    "[[a]] [[b|c]] [[d|e|f]] [[Re: g]] [[h (i)|]]": "a c e|f Re: g h",
    "[[wikt:a]] [[:fr:b]] [[:c|d]] [[e|'''f''']]s": "a fr:b d fs",
    "[http://a.example b c] [https://d.example] http://e.example [//f.example g] [1]": "b c http://e.example g [1]",
    "a [[b": "a b",
    "'''a''' ''b'' '''''c''''' d'e": "a b c d'e",
    "l'''Iliade''": "l'Iliade",
    "l''''Iliade'''": "l'Iliade",
    "a<br>b<br />c<BR/>\nd": "a b c d",
    '<p>a</p><div class="b">c <span>d</span> <code>e</code></div>': "a\n\nc d e",
    "* a\n** b\n# c\n: d\n; e : f": "a\nb\nc\nd\ne : f",
    "<nowiki>''a'' [[b]] {{c}}</nowiki><nowiki/>d": "''a'' [[b]] {{c}}d",
    "<pre>\n* a = [[1]]\n</pre>": "* a = [[1]]",
    "a&nbsp;&amp;&lt;b&gt; &#8211; &#x2014; &unknown; AT&T": "a &<b> – — &unknown; AT&T",
    "-{a}- f() C++": "-{a}- f() C++",
}

SCRIPTS = {  # superscripts do not join the number before them
    "10<sup>3</sup> 10<sup>−15</sup> m<sup>2</sup> <sup>238</sup>U": "10³ 10⁻¹⁵ m² ²³⁸U",
    "19<sup>th</sup> 1<sup>er</sup> n<sup>o</sup> M<sup>me</sup> A<sup>TM</sup>": "19th 1er no Mme ATM",
    "''x''<sup>''n''</sup> 2<sup>n+1</sup> (a)<sup>b</sup> e<sup>x/2</sup>": "x^n 2^(n+1) (a)^b e^(x/2)",
    "H<sub>2</sub>O 1010<sub>2</sub> v<sub>max</sub> ''x''<sub>''i''+1</sub>": "H2O 1010₂ v_max x_(i+1)",
    "x<sub>i</sub><sup>2</sup> SO<sub>4</sub><sup>2−</sup> H<sub>2</sub>O<sub>(l)</sub>": "x_i² SO4²⁻ H2O(l)",
}

FORMULAS = {
    r"\alpha_i \le 2^n": "α_i ≤ 2^n",
    r"\frac{a+1}{2}": "(a+1)/2",
    r"\frac12 x": "1/2 x",
    r"x_{i,j} \in \{0,1\}": "x_(i,j) ∈ {0,1}",
    r"\sqrt{2\pi}": "√(2π)",
    r"\sin^2(\theta) + \log x,": "sin²(θ) + log x,",
    r"\mathbb{R}^3 \to \mathrm{A}_\text{max}": "ℝ³ → A_max",
    r"\bar{x} = \sum_{i=1}^n x_i": "x̄ = ∑_(i=1)^n x_i",
    r"k^{th} < \left(10^{-3}\right)": "kth < (10⁻³)",
    r"a - b\,": "a − b",
}


@pytest.mark.parametrize("latex", FORMULAS)
def test_formula_of_a_sentence_is_written_as_text(latex: str) -> None:
    assert prose(f"A <math>{latex}</math> B") == f"A {FORMULAS[latex]} B"


@pytest.mark.parametrize("latex", [r"\begin{pmatrix} a & b \end{pmatrix}", r"{a \over b}", "x" * 200, r"\unknown{a}"])
def test_formula_without_a_plain_form_is_removed(latex: str) -> None:
    assert prose(f"A (<math>{latex}</math>), B <math>{latex}</math>.") == "A, B."


GAPS = {  # brackets and commas around a removed part are closed
    "A ({{x}}) is": "A is",
    "A ({{x}}; {{y}} or {{z}}), is": "A, is",
    "A ({{x}}; born 1900) is": "A (born 1900) is",
    "A (born 1900, {{x}}) is": "A (born 1900) is",
    "A (b, {{x}}, c) is": "A (b, c) is",
    "A ([[File:B.ogg|c]] {{x}}, born ({{y}}) 1900) is": "A (born 1900) is",
    "A {{x}}, b {{y}}. C {{z}} d": "A, b. C d",
    "A (pronounced {{x}}) is": "A is",
    "A (b, pronounced {{x}}) is pronounced {{y}} in c": "A (b) is pronounced in c",
    "f() and ( ) and (, ) stay": "f() and ( ) and (, ) stay",
    "word{{x}}word": "wordword",
    "A （{{x}}、{{y}}）は": "A は",
}


@pytest.mark.parametrize("markup", TEXTS := REMOVED | SHOWN | SCRIPTS | GAPS)
def test_markup_becomes_prose(markup: str) -> None:
    assert prose(markup) == TEXTS[markup]


ENDS = {
    "en": ["References", "Footnotes", "Notes and references", "Sources, notes & links", "See also:", "Bibliography"],
    "de": ["Einzelnachweise", "Weblinks", "Siehe auch", "Anmerkungen und Einzelnachweise", "Literatur", "References"],
    "fr": ["Notes et références", "Liens externes", "Voir aussi", "Bibliographie"],
    "es": ["Referencias", "Enlaces externos", "Véase también", "Notas y referencias"],
    "it": ["Note", "Collegamenti esterni", "Voci correlate", "Altri progetti"],
    "pt": ["Referências", "Ligações externas", "Ver também", "Notas e referências"],
    "nl": ["Externe links", "Zie ook", "Bronnen, noten en/of referenties"],
    "pl": ["Przypisy", "Linki zewnętrzne", "Zobacz też"],
    "ru": ["Примечания", "Ссылки", "См. также", "Примечания и ссылки", "Литература"],
    "uk": ["Примітки", "Посилання", "Див. також"],
    "sv": ["Referenser", "Externa länkar", "Se även", "Noter och referenser"],
    "cs": ["Reference", "Externí odkazy", "Související články"],
    "ja": ["脚注", "出典", "関連項目", "外部リンク", "注釈・出典"],
    "zh": ["参考文献", "外部連結", "参见", "注释与参考文献"],
    "ko": ["각주", "외부 링크", "같이 보기"],
    "ar": ["المراجع", "وصلات خارجية"],
    "he": ["הערות שוליים", "קישורים חיצוניים"],
    "tr": ["Kaynakça", "Dış bağlantılar"],
}  # fmt: skip


@pytest.mark.parametrize("language", ENDS)
def test_sections_at_the_end_are_known_in_each_language(language: str) -> None:
    wiki = Wiki.of(language)
    for title in ENDS[language]:
        assert prose(f"a\n== {title} ==\nb\n=== c ===\nd\n== E ==\nf", wiki) == "a\n\nE\nf", title
        assert prose(f"a\n== The {title} of x ==\nb", wiki).endswith("b")


def test_every_language_of_the_list_knows_its_own_words() -> None:
    words = {language: table for language, table in read_words().items() if isinstance(table, dict)}
    assert len(words) > 20
    for language, table in words.items():
        wiki = Wiki.of(language)
        assert all(wiki.is_end(title, 2) for title in (*table["end"], *table.get("chapters", ())))
        assert all(name.lower() in wiki.unseen for name in (*table["files"], *table["categories"]))
        assert not any(wiki.is_end(title, 3) for title in table.get("chapters", ()))


def test_chapter_about_literature_is_prose_below_another_chapter() -> None:
    assert prose("a\n== Culture ==\n=== Literature ===\nb") == "a\n\nCulture\n\nLiterature\nb"


def test_heading_may_hold_markup() -> None:
    assert prose("a\n==''See'' [[x|also]]<ref>b</ref> == <!-- c -->\nd") == "a"


def test_heading_without_prose_below_it_is_left_out() -> None:
    assert prose("== a ==\n=== b ===\n{{c}}\n=== d ===\ne\n== f ==\n[[File:g.jpg]]") == "a\n\nd\ne"


def test_links_follow_the_namespaces_of_the_wiki() -> None:
    files = "[[Datei:B.jpg|mini|c]][[Bild:B.jpg]][[File:B.jpg]][[kategorie:D]]"
    markup = f"a{files} [[Portal:E]] [[Portal:E|f]] [[Diskussion:G|h]]"
    assert prose(markup, GERMAN) == "a f h"


def test_magic_words_are_known_in_all_scripts() -> None:
    assert (
        prose("__KEIN_INHALTSVERZEICHNIS__a __БЕЗ_ОГЛ__b __目次非表示__c __init__ __FILE__")
        == "a b c __init__ __FILE__"
    )


HOSTILE = {
    "templates": "{{" * 100_000,
    "arguments": "{{lang|fr|" * 50_000,
    "links": "[[" * 100_000,
    "files": "[[File:a|" * 50_000,
    "references": "<ref>" * 50_000,
    "comments": "<!--" * 100_000,
    "tables": "\n{|" * 50_000,
    "headings": "\n== a" * 50_000,
    "heading": "==" + "a=" * 100_000,
    "blanks in a heading": "==" + " " * 100_000 + "a",
    "blanks in a line": "a (" + " " * 100_000 + "{{x}}" + " " * 100_000 + "b",
    "quotes": "'''a''" * 50_000,
    "superscripts": "x<sup>" + "1+" * 100_000 + "</sup>",
    "brackets": "(, " * 50_000 + "{{x}}",
    "gaps": ", {{x}} " * 30_000,
    "formulas": r"<math>\frac{a}{b}" * 30_000,
    "numbers": "{{val|" + "1" * 10_000 + "}}{{convert|" + "9" * 9000 + "|km}}{{convert|1|" + "e6" * 3000 + "km}}",
    "dates": "{{birth date|" + "1" * 9000 + "|" + "1" * 9000 + "}}{{as of|1|" + "1" * 9000 + "}}",
    "entities": "&#" * 100_000,
    "spaces": "a" + " " * 200_000 + "{{x}}b",
    "function and a long word": "{{lc:" + "a" * 100_000 + "}}",
    "function with prefixes": "{{" + "subst: " * 10_000 + "uc:" + "a" * 50_000 + "}}",
    "link and spaces": "[[a" + " " * 100_000 + "b|]]",
    "argument of spaces": "{{nowrap|" + " " * 100_000 + "}}",
    "argument of words": "{{lang|fr|" + "a " * 50_000 + "}}",
    "external link": "[http://a" + "|-" * 50_000,
    "literal elements": "<nowiki>" * 5000 + "</nowiki>" * 5000,
    "preformatted elements": "<pre>" * 5000 + "</pre>" * 5000,
    "literal and preformatted": "<pre><nowiki>" * 5000 + "</nowiki></pre>" * 5000,
    "targets": "{{convert|" + "1|,|" * 200 + "1|km|" + "mi " * 30_000 + "}}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_markup_takes_time_in_proportion_to_its_length(kind: str) -> None:
    start = time.process_time()
    prose(HOSTILE[kind])
    assert time.process_time() - start < 5


def test_damaged_markup_raises_nothing() -> None:
    chance = random.Random(0)
    parts = ("{{convert|", "{{val|", "{{birth date|", "|", "}}", "]]", "=", "1", "-", "\n", "<math>")
    pieces = [*SHOWN, *REMOVED, *GAPS, *SCRIPTS, *parts]
    for _ in range(1000):
        markup = "".join(chance.choice(pieces)[chance.randrange(3) :] for _ in range(20))
        prose(markup, chance.choice((None, GERMAN)))
