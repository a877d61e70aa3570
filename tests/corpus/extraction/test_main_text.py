"""The main text of a page is whole, and little else is with it."""

import time

import pytest
from resiliparse.parse.html import HTMLTree

from crosscut.corpus.extraction.boilerplate import RULES, find_rule
from crosscut.corpus.extraction.main_text import find_main_text

SENTENCE = "The committee of the harbour met on Tuesday and agreed that the northern wall must be built again. "
ARTICLE = f"<h1>The wall</h1><p>{SENTENCE * 3}</p><p>{SENTENCE * 3}</p>"

LEFT_OUT = {
    "comments": '<div id="comments"><ol><li><p>I do not agree with a word.</p></li></ol></div>',
    "navigation": '<div class="book-navigation"><a href="2">Chapter 2</a></div>',
    "footer": '<div id="siteFooter"><p>Harbour Press, 1 Quay Street</p></div>',
    "share": '<ul class="share_buttons"><li><a href="m">Mail this</a></li></ul>',
    "request": '<div class="newsletter-box"><p>Get our letters every week.</p></div>',
    "related": '<section class="MostRead"><h2>Most read</h2><p>The bridge is late again.</p></section>',
    "author": '<div class="author-bio"><p>She writes about walls.</p></div>',
    "notice": '<div id="cookie-law"><p>We use cookies.</p></div>',
    "widget": '<div class="forumrules"><p>You may not post attachments</p></div>',
}


def main_text(body: str) -> str:
    markup = f"<!DOCTYPE html><html><head><title>The wall</title></head><body>{body}</body></html>"
    return find_main_text(HTMLTree.parse(markup), markup)


def test_every_rule_has_a_case() -> None:
    assert [rule.name for rule in RULES] == list(LEFT_OUT)


@pytest.mark.parametrize("rule", LEFT_OUT)
def test_boilerplate_is_left_out(rule: str) -> None:
    text = main_text(f"<div><div>{ARTICLE}</div>{LEFT_OUT[rule]}</div>")
    assert text == main_text(f"<div><div>{ARTICLE}</div></div>")
    assert text.count(SENTENCE.strip()) == 6


@pytest.mark.parametrize(
    "container", ["share", "navigation-container", "promoted", "has-sidebar", "blog-post--social-link", "print-only"]
)
def test_container_of_the_article_may_have_any_name(container: str) -> None:
    assert main_text(f'<div class="{container}">{ARTICLE}</div>').count(SENTENCE.strip()) == 6


@pytest.mark.parametrize("tag", ["aside", "noscript"])
def test_article_where_nobody_looks_for_it_is_found(tag: str) -> None:
    page = f"<header>Harbour</header><nav>Home</nav><{tag}>{ARTICLE}</{tag}>"
    assert main_text(page).count(SENTENCE.strip()) == 6


@pytest.mark.parametrize("tag", ["nav", "footer"])
def test_page_of_nothing_but_its_frame_has_no_main_text(tag: str) -> None:
    assert main_text(f"<{tag}>{SENTENCE * 9}</{tag}>") == ""


def test_form_around_the_page_is_no_form_in_the_page() -> None:
    form = "<form><p>Send us your news of the harbour</p></form>"
    assert main_text(f"<form>{ARTICLE}</form>").count(SENTENCE.strip()) == 6
    assert "Send us" not in main_text(f"<div>{ARTICLE}{form}</div>")


EXPLAINED = {
    "en": "Use this form to tell the committee what you think of the wall: we shall answer within three days.",
    "it": "Compila il modulo per richiedere informazioni sul servizio: le risponderemo entro tre giorni lavorativi.",
    "ja": "いただいた内容は委員会が確認し、三日以内にメールで返信いたします。",
    "ru": "Комитет прочитает ваше письмо и ответит вам в течение трёх рабочих дней.",
}


@pytest.mark.parametrize("language", EXPLAINED)
@pytest.mark.parametrize("tag", ["p", "div"])
def test_form_is_the_main_text_if_little_else_is_prose(tag: str, language: str) -> None:
    said = EXPLAINED[language]
    menu = "<div>" + '<a href="x">News of the harbour</a> ' * 40 + "</div>"
    form = f"<div><form><{tag}>{said}</{tag}><label>Name</label><input><{tag}>{said}</{tag}></form></div>"
    short = f"<div><form><{tag}>{said}</{tag}><label>Name</label><input></form></div>"
    assert main_text(f"{menu}<h1>Write to us</h1>{form}").count(said) == 2
    assert said not in main_text(f"{menu}<h1>Write to us</h1>{short}")
    assert said not in main_text(f"{menu}<h1>The wall</h1>{f'<p>{SENTENCE * 3}</p>' * 6}{form}")


def test_box_of_prose_stays_in_the_text() -> None:
    """DocBook marks boxes with `sidebar`, the class of most blogs' lists of links."""
    box = f'<div class="sidebar"><p>{SENTENCE * 4}</p></div>'
    links = '<div class="sidebar"><ul>' + '<li><a href="x">Older news of the harbour</a></li>' * 30 + "</ul></div>"
    text = main_text(f"<div>{ARTICLE}{box}{links}</div>")
    assert text.count(SENTENCE.strip()) == 10
    assert "Older news" not in text


def test_code_and_tables_stay_whole() -> None:
    code = '<span class="comment">// next</span>\n    <b class="nav">int</b> share = 1;\n'
    table = "<table><tr><td>stone</td><td>40 tons</td></tr><tr><td>sand</td><td>7 tons</td></tr></table>"
    text = main_text(f"<div>{ARTICLE}<pre class='prev'><code>{code}</code></pre>{table}</div>")
    assert "// next\n    int share = 1;" in text
    assert "stone\t\t40 tons\nsand\t\t7 tons" in text.replace("\n\n", "\n")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("nav-footer", "navigation"),
        ("navFooter", "navigation"),
        ("page__foot", "footer"),
        ("has-comments", None),
        ("no_share", None),
        ("sharecropper", None),
        ("", None),
    ],
)
def test_rule_needs_a_whole_word(name: str, rule: str | None) -> None:
    found = find_rule(name, "")
    assert (found and found.name) == rule
    assert find_rule("", name) is found


def seconds(body: str) -> float:
    start = time.process_time()
    main_text(body)
    return time.process_time() - start


@pytest.mark.parametrize("shape", ["nested", "beside"])
def test_time_grows_with_the_page_and_no_faster(shape: str) -> None:
    """Elements that share one name: 900 nested ones, or 20,000 beside each other."""
    if shape == "nested":
        page = '<div class="share">a <b>word</b>' * 900 + SENTENCE * 2000 + "</div>" * 900
    else:
        page = '<div class="share">a <b>word</b></div>' * 20_000
    assert seconds(page) < 5


ITEMS = (
    "<li>See <a href=x>the manual</a> for the first of them, which has more.</li>"
    "<li>Or ask <a href=y>a friend</a> who knows about such things.</li><li>A third way is to wait.</li>"
)


@pytest.mark.parametrize("root", ["{}", "<main>{}</main>", "<article>{}</article>", "<div><div>{}</div></div>"])
@pytest.mark.parametrize(
    "block",
    [
        "<ul>{}</ul>",
        "<ol><li>Numbered<ul>{}</ul></li></ol>",
        "<ul><li>Outer item<ul>{}</ul></li></ul>",
        "<blockquote><ul>{}</ul></blockquote>",
        "<dl><dt>Term</dt><dd><ul>{}</ul></dd></dl>",
        "<details><summary>More</summary><ul>{}</ul></details>",
        "<section><h2>Sources</h2><ul>{}</ul></section>",
        "<figure><ul>{}</ul></figure>",
        "<menu>{}</menu>",
    ],
)
def test_list_near_the_root_is_text_if_its_links_stand_in_sentences(root: str, block: str) -> None:
    text = main_text(root.format(ARTICLE + block.format(ITEMS) + ARTICLE))
    assert "for the first of them" in text
    assert "a friend" in text


def test_list_of_links_near_the_root_is_a_menu() -> None:
    links = "<ul><li><a href=x>Our goods</a></li><li><a href=y>Imprint of us</a></li></ul>"
    for root in ("{}", "<main>{}</main>", "<div><div>{}</div></div>"):
        assert "Imprint" not in main_text(root.format(links + ARTICLE))


@pytest.mark.parametrize("root", ["{}", "<main>{}</main>", "<div><div><div><div>{}</div></div></div></div>"])
@pytest.mark.parametrize(
    "figure",
    [
        "<figure><img src=a alt=alt><figcaption>Words of it</figcaption></figure>",
        "<figure><table><tr><td>Words of it</td></tr></table></figure>",
        "<figure class=highlight><pre><code>Words of it</code></pre></figure>",
        "<figure><blockquote>Words of it</blockquote><figcaption>Author</figcaption></figure>",
        "<figure><figure><figcaption>Words of it</figcaption></figure></figure>",
        "<div><figcaption>Words of it</figcaption></div>",
        *(
            block.format(line)
            for block in (
                "<p>{}</p>",
                "<div>{}</div>",
                "<blockquote>{}</blockquote>",
                "<ul><li>{}</li></ul>",
                "<dl><dt>Born</dt><dd>{}</dd></dl>",
                "<table><tr><td>{}</td></tr></table>",
                "<figure><figcaption>{}</figcaption></figure>",
            )
            for line in (
                "Her birthday, <time>Words of it</time>, was a Monday.",
                "<time>Words of it</time> is a Monday.",
            )
        ),
        "<h3>Events of <b><time>Words of it</time></b></h3>",
        "<p>Signed by <b>Ann</b> <time>Words of it</time> in Rome.</p>",
    ],
)
def test_figures_and_dates_in_sentences_stay(root: str, figure: str) -> None:
    text = main_text(root.format(ARTICLE + figure + ARTICLE))
    assert text.count("Words of it") == 1


@pytest.mark.parametrize(
    "figure",
    [
        "<a href=x><figure><img src=a><figcaption>Words of it</figcaption></figure></a>",
        "<figure><a href=x><img src=a>Words of it</a></figure>",
        f"<figure><a href=x><img src=a><figcaption>Words of it{' and more' * 20}</figcaption></a></figure>",
        "<figure><form>Words of it <input></form>Words of it</figure>",
        "<p><time>Words of it</time></p>",
        "<div> <b><time>Words of it</time></b> </div>",
        "<div><time>Words of it</time><p>Another block.</p></div>",
    ],
)
def test_figures_of_links_and_forms_and_lines_with_a_date_are_left_out(figure: str) -> None:
    assert "Words of it" not in main_text(f"<main>{ARTICLE}{figure}{ARTICLE}</main>")


def test_many_figures_take_no_more_time_than_the_page() -> None:
    began = time.process_time()
    for body in (
        "<figure>" * 900 + "words <b>x</b>" * 3000,
        "<figure><figcaption>a</figcaption></figure>" * 5000,
        "<time>a</time>b" * 10**4,
        "<blockquote><time>a</time>" * 900 + "<b>x</b>" * 3000,
    ):
        main_text(f"{ARTICLE}<p>{body}")
    assert time.process_time() - began < 2
