"""Hostile values, by name. Cases and reproductions name a value instead of spelling 100,000 characters.

A word is one text that any place may receive. `JSON` and `TOML` hold source text of the language: the words as strings,
and values that only the language has, such as `NaN` or 100,000 brackets.
"""

import json
import os

WORDS = {
    "empty": "", "space": " ", "word": "abc", "dash": "-", "option": "--help",
    "zero": "0", "one": "1", "two": "2", "minus-one": "-1", "minus-five": "-5", "half": "0.5", "below-half": "-0.5",
    "million": "1000000", "billion": "1000000000", "hundred-billion": "100000000000", "2-to-63": str(1 << 63),
    "23-digits": "1" + "0" * 22, "5000-digits": "9" * 5000, "huge-float": "1e308", "infinite": "1e999",
    "tiny-float": "1e-320",
    "nan": "nan", "minus-inf": "-inf",
    "true": "true", "none": "none", "auto": "auto", "arabic-digits": "\u0663\u0664", "underscores": "1_0",
    "title": "\x1b]0;owned\x07", "erase": "\x1b[2J\x1b[H", "red": "\x1b[31mred", "c1": "\x9b2J\x9d0;owned\x9c",
    "bell": "a\x07\x08\x7f",
    "lines": "a\nb\r\nc",
    "right-to-left": "\u202eabc", "wide": "\U0001f469\u200d\U0001f680\u0301", "not-utf-8": "\udcff",
    "markup": "[bold]a[/bold]", "broken-markup": "[/]", "link-markup": "[link=http://a]b[/link]",
    "emoji-markup": ":smile:", "format": "{0} {name!r} %s %n",
    "up": "../../../../nowhere/file", "device": "/dev/null/file", "url": "s4://nowhere/run", "glob": "[", "stars": "**",
    "name-100": "n" * 100, "name-300": "n" * 300, "letters-100000": "a" * 100_000, "brackets-100000": "[" * 100_000,
    "escapes-20000": "\x1b[31m" * 20_000,
}  # fmt: skip
"""Texts that a command line can carry: no NUL, and bytes that are not UTF-8 as the surrogates that Python gives them.
"""

_NUMBERS = ("zero", "one", "two", "minus-one", "minus-five", "half", "below-half", "million",
            "billion", "hundred-billion", "2-to-63", "23-digits", "5000-digits",
            "huge-float", "infinite", "tiny-float")  # fmt: skip

_STRINGS = {f'"{name}"': json.dumps(word) for name, word in WORDS.items() if name not in ("not-utf-8", "wide")}
_PLAIN = {name: WORDS[name] for name in _NUMBERS} | {"true": "true", "false": "false"}

JSON = _STRINGS | _PLAIN | {
    "null": "null", "NaN": "NaN", "Infinity": "Infinity", "-Infinity": "-Infinity",
    '"nul"': '"a\\u0000b"', '"surrogate"': '"\\ud800"', '"wide"': json.dumps(WORDS["wide"]),
    '"template"': '"{{ messages }}"',
    "list": "[]", "list-of-strings": '["a", "b"]', "list-of-mixed": '[1, "a", null, {}, []]',
    "list-of-surrogates": '["\\ud800", "\\udfff"]', "list-of-100000": "[" + "0," * 99_999 + "0]",
    "object": "{}", "object-of-surrogate": '{"\\ud800": 1}', "object-of-same": '{"a": 1, "a": 2}',
    "object-of-content": '{"content": "\\u001b]0;owned\\u0007"}',
    "nested-800": '{"a":' * 800 + "1" + "}" * 800, "nested-100000": "[" * 100_000 + "]" * 100_000,
    "open-100000": "[" * 100_000,
}  # fmt: skip
"""Values as JSON text. Not all are valid JSON."""

TOML = _STRINGS | _PLAIN | {
    "nan": "nan", "inf": "inf", "minus-inf": "-inf",
    '"nul"': '"a\\u0000b"', '"surrogate"': '"\\ud800"',
    "date": "1979-05-27", "time": "07:32:00", "hexadecimal": "0x" + "f" * 5000,
    "list": "[]", "list-of-strings": '["a", "b"]', "list-of-escapes": '["\\u001b]0;owned\\u0007"]',
    "list-of-mixed": '[1, "a", {}, []]',
    "table": "{}", "table-of-escape": '{"\\u001b[2J" = 1}',
    "nested-800": "{a=" * 800 + "1" + "}" * 800, "nested-100000": "[" * 100_000 + "]" * 100_000,
    "open-100000": "[" * 100_000,
}  # fmt: skip
"""Values as TOML text. Not all are valid TOML."""

ARGUMENTS = {name: value for name, value in (TOML | WORDS).items() if len(os.fsencode(value)) < 128 << 10}
"""Values of options and overrides. Linux limits an argument to 128 KiB."""

TEMPLATES = {
    "fair": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "nothing": "",
    "only-last": "{{ messages[-1].content }}",
    "surrogate": "{{ '\\ud800' }}",
    "escape": "{{ '\x1b]0;owned\x07' }}",
    "parentheses-50000": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "not-closed": "{% for m in messages %}",
    "unknown-tag": "{% include '/etc/passwd' %}",
    "unknown-filter": "{{ messages | nothing }}",
    "undefined": "{{ nothing.a.b }}",
    "zero-division": "{{ 1 // 0 }}",
    "slow": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
            "{% endfor %}{% endfor %}{% endfor %}",
    "memory": "{{ 'a' * 10000000000 }}",
    "memory-list": "{{ [0] * 10000000000 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "pad": "{{ '%*s' % (2000000000, 'a') }}",
    "format": "{{ '{:2000000000}'.format('a') }}",
    "center": "{{ 'a' | center(2000000000) }}",
    "join": "{{ (range(99999) | list * 99999) | join }}",
    "deep": "{% if true %}" * 3000 + "a" + "{% endif %}" * 3000,
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "python": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
    "raise": "{{ raise_exception('\x1b]0;owned\x07') }}",
    "raise-number": "{{ raise_exception(7) }}",
    "time-format": "{{ strftime_now('%' * 100000) }}",
    "json": "{{ messages | tojson(indent=1000000) }}",
    "json-of-range": "{{ range(3) | tojson }}",
    "5000-digits": "{{ " + "9" * 5000 + " }}",
    "long": "a" * 1_000_000,
    "generation": "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "wrong-type": "{{ messages[0].content + 1 }}",
    "loop-control": "{% for m in messages %}{% break %}{% endfor %}x",
}  # fmt: skip
"""Chat templates: programs that come with a model."""
