"""The main text of pages in other languages: what a label opens is left out, and the article is whole."""

import time

import pytest
from resiliparse.parse.html import HTMLTree

from crosscut.corpus.extraction.ends import without_ends
from crosscut.corpus.extraction.main_text import find_main_text

SENTENCES = {
    "de": "Der Ausschuss des Hafens tagte am Dienstag und beschloss, dass die nördliche Mauer neu gebaut werden muss. ",
    "es": "El comité del puerto se reunió el martes y acordó que el muro del norte debe construirse de nuevo. ",
    "fr": "Le comité du port s'est réuni mardi et a convenu que le mur du nord doit être entièrement reconstruit. ",
    "hu": "A kikötő bizottsága kedden ülésezett, és úgy döntött, hogy az északi falat újra fel kell építeni. ",
    "it": "Il comitato del porto si è riunito martedì e ha deciso che il muro a nord deve essere ricostruito. ",
    "ja": "港の委員会は火曜日に会合を開き、北側の防波堤を建て直す必要があるということで意見が一致した。",
    "pl": "Komitet portu zebrał się we wtorek i zgodził się, że północny mur trzeba zbudować całkiem od nowa. ",
    "pt": "O comité do porto reuniu-se na terça-feira e concordou que o muro do norte deve ser reconstruído. ",
    "ru": "Комитет порта собрался во вторник и решил, что северную стену необходимо построить заново. ",
    "zh": "港口委员会星期二开会、一致认为北面的防波堤必须重新修建、工程将于明年春天开始、预计需要两年时间。",
}
LABELS = {
    "de": "Mehr zum Thema",
    "es": "Lea también:",
    "fr": "Sur le même sujet",
    "hu": "Kapcsolódó cikkek (3)",
    "it": "Leggi anche",
    "ja": "【関連記事】",
    "pl": "Czytaj także",
    "pt": "Leia também »",
    "ru": "Читайте также",
    "zh": "相关阅读 >",
}
NAMES = {
    "de": "mehr-zum-thema",
    "es": "leaTambien",
    "fr": "sur_le_meme_sujet",
    "hu": "kapcsolodo",
    "it": "articoli-correlati",
    "ja": "kanren",
    "pl": "najczesciej-czytane",
    "pt": "mais-lidas",
    "ru": "pohozhie",
    "zh": "tuijian",
}
RIGHTS = {
    "de": "Alle Rechte vorbehalten, Hafenverlag",
    "es": "© Editorial del Puerto",
    "it": "Editore del Porto - Tutti i diritti riservati.",
    "pl": "Wydawnictwo Portowe. Wszelkie prawa zastrzeżone",
    "zh": "版权所有 港口出版社",
}


def article(language: str, paragraphs: int = 3) -> str:
    return "<h1>4711</h1>" + f"<p>{SENTENCES[language] * 3}</p>" * paragraphs


def teasers(language: str) -> str:
    """Return three links, each with a sentence about another page."""
    return "".join(
        f'<div><a href="{number}">{number} 4712</a><p>{number}: {SENTENCES[language]}</p></div>' for number in "123"
    )


def main_text(body: str) -> str:
    markup = f"<!DOCTYPE html><html><head><title>4711</title></head><body>{body}</body></html>"
    return find_main_text(HTMLTree.parse(markup), markup)


def count(text: str, language: str) -> int:
    return text.count(SENTENCES[language].strip())


@pytest.mark.parametrize("language", LABELS)
def test_what_a_heading_opens_is_left_out(language: str) -> None:
    part = f"<div><div><h3>{LABELS[language]}</h3></div>{teasers(language)}</div>"
    text = main_text(f"<div><div>{article(language)}</div>{part}</div>")
    assert "4712" not in text and count(text, language) == 9


@pytest.mark.parametrize("language", NAMES)
def test_names_in_other_languages_are_known(language: str) -> None:
    part = f'<div class="{NAMES[language]}">{teasers(language)}</div>'
    text = main_text(f"<div><div>{article(language)}</div>{part}</div>")
    assert "4712" not in text and count(text, language) == 9


@pytest.mark.parametrize("language", LABELS)
def test_label_and_title_between_paragraphs_are_left_out(language: str) -> None:
    label = LABELS[language].removesuffix(" (3)").strip(" :>»【】")
    link = f'<p><strong>{label}:</strong> <a href="x">4712</a></p>'
    text = main_text(f"<div>{article(language)}{link}<p>{SENTENCES[language] * 2}</p></div>")
    assert "4712" not in text and count(text, language) == 11


@pytest.mark.parametrize("language", RIGHTS)
def test_line_about_rights_is_left_out(language: str) -> None:
    text = main_text(f"<div>{article(language)}<div>{RIGHTS[language]}</div></div>")
    assert text.endswith(SENTENCES[language].strip()) and count(text, language) == 9


def test_buttons_around_the_article_are_left_out() -> None:
    text = main_text(f"<div><span>Drucken</span><div>{article('de')}</div><div>Nach oben ↑</div></div>")
    assert "Drucken" not in text and "Nach oben" not in text and count(text, "de") == 9


def test_section_with_the_title_of_a_label_stays_if_it_is_prose() -> None:
    part = f"<div><h2>Kommentare</h2><p>{SENTENCES['de'] * 4}</p></div>"
    text = main_text(f"<div>{article('de')}{part}</div>")
    assert count(text, "de") == 13


@pytest.mark.parametrize("label", ["Kommentare", "Comments", "Комментарии"])
def test_one_word_before_a_colon_is_no_label(label: str) -> None:
    line = f"<p>{label}: Der Hafen ist zu klein, sagen die einen, und viel zu groß, sagen alle anderen hier.</p>"
    assert "Der Hafen ist zu klein" in main_text(f"<div>{article('de')}{line}<p>{SENTENCES['de']}</p></div>")


def test_page_of_links_keeps_its_labels() -> None:
    links = "".join(f'<p><a href="{number}">Hafen {number}</a> im Norden</p>' for number in range(40))
    assert "Mehr zum Thema" in main_text(f"<div><p>Mehr zum Thema</p>{links}</div>")


def test_line_of_spaces_is_no_prose() -> None:
    text = "\n".join([SENTENCES["de"] * 3, "Mehr zum Thema", " " * 200, "Der Hafen im Norden"])
    assert without_ends(text) == (SENTENCES["de"] * 3).strip()


@pytest.mark.parametrize("place", ["{}", "<div>{}</div>", "<div><div>{}</div></div>"])
def test_list_of_text_near_the_root_stays_and_a_menu_does_not(place: str) -> None:
    steps = f"<ul><li><p>{SENTENCES['it']}</p></li><li><p>{SENTENCES['it']}</p></li></ul>"
    menu = "<ul>" + '<li><a href="x">4712</a></li>' * 9 + "</ul>"
    text = main_text(place.format(menu + article("it") + steps))
    assert "4712" not in text and count(text, "it") == 11


def test_part_of_an_article_made_with_elementor_is_no_widget() -> None:
    part = (
        f'<div class="elementor-element elementor-widget elementor-widget-text-editor"><p>{SENTENCES["pl"]}</p></div>'
    )
    assert count(main_text(f"<div>{article('pl')}{part}</div>"), "pl") == 10


@pytest.mark.parametrize("shape", ["nested", "beside"])
def test_time_of_labels_grows_with_the_page_and_no_faster(shape: str) -> None:
    if shape == "nested":
        page = "<div><h3>Mehr zum Thema</h3><b>4712</b>" * 300 + SENTENCES["de"] * 2000 + "</div>" * 300
    else:
        page = "<div><h3>Mehr zum Thema</h3><b>4712</b></div>" * 5000
    start = time.process_time()
    main_text(page)
    assert time.process_time() - start < 3
