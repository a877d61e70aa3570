r"""Write the short formulas of a sentence as text: <math>\alpha_i \le 2^n</math> becomes "α_i ≤ 2^n".

A sentence without its variables makes no sense, so a formula that has a plain form is kept. A formula that needs two
dimensions, such as a matrix or a sum with limits, is removed.
"""

import re

from crosscut.corpus.readers.wikitext.markup import GAP, escape
from crosscut.corpus.readers.wikitext.tags import raised

MAX_LENGTH = 120
"""Maximum length of a formula that is kept."""

MAX_DEPTH = 6
"""Maximum nesting of braces in a formula that is kept."""

_LETTERS = (
    "alpha α beta β gamma γ delta δ epsilon ε varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu "
    "μ nu ν xi ξ pi π rho ρ sigma σ tau τ upsilon υ phi φ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda "
    "Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω infty ∞ partial ∂ nabla ∇ emptyset ∅ varnothing ∅ forall ∀ "
    "exists ∃ neg ¬ lnot ¬ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ ldots … dots … cdots ⋯ dotsc … dotsb ⋯ "
    "prime ′ hbar ℏ ell ℓ aleph ℵ sum ∑ prod ∏ int ∫ angle ∠ degree ° R ℝ N ℕ Z ℤ Q ℚ C ℂ lbrace { rbrace } vert | "
    "Vert ‖ dagger † circ ∘"
)
"""Commands for letters and brackets, each followed by its character."""

_RELATIONS = (
    "times × cdot · div ÷ pm ± mp ∓ le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ approx ≈ sim ∼ thicksim ∼ simeq ≃ equiv ≡ cong ≅ "
    "propto ∝ ll ≪ gg ≫ to → rightarrow → leftarrow ← Rightarrow ⇒ Leftarrow ⇐ leftrightarrow ↔ Leftrightarrow ⇔ iff "
    "⇔ mapsto ↦ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ cup ∪ cap ∩ land ∧ wedge ∧ lor ∨ vee ∨ "
    "oplus ⊕ otimes ⊗ bullet • star ⋆ ast ∗ perp ⊥ parallel ∥ mid | setminus ∖ colon :"
)
"""Commands for operators, each followed by its character. Operators are written with spaces around them."""

_FUNCTIONS = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp det dim ker gcd deg arg mod max min"
)


def _pairs(table: str, space: str) -> dict[str, str]:
    words = table.split()
    return {name: f"{space}{sign}{space}" for name, sign in zip(words[::2], words[1::2], strict=True)}


_SYMBOLS = {**_pairs(_LETTERS, ""), **_pairs(_RELATIONS, " "), **{name: f"{name} " for name in _FUNCTIONS.split()}}
_ACCENTS = {
    "bar": "\u0304", "overline": "\u0304", "hat": "\u0302", "tilde": "\u0303", "vec": "\u20d7", "dot": "\u0307",
    "ddot": "\u0308",
}  # fmt: skip
_DOUBLE = dict(zip("CFNPQRZ", "ℂ𝔽ℕℙℚℝℤ", strict=True))

_COMMAND = re.compile(r"\\([A-Za-z]+)")
_NAMED = re.compile(
    r"\\(?:text(?:rm|it|bf)?|math(?:rm|bf|it|sf|cal|frak)|operatorname|mbox|boldsymbol|rm|bf)"
    r"(?:\*?\s*\{([^{}]*)\}|\s+|(?=\d))"
)
_ACCENT = re.compile(rf"\\({'|'.join(_ACCENTS)}|mathbb)(?:\s*\{{\s*(\w)\s*\}}|\s+(\w))")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}|\\[dt]?frac\s*(\d)\s*(\d)")
_ROOT = re.compile(r"\\sqrt\s*\{([^{}]*)\}")
_SCRIPT = re.compile(r"(?<!\s)\s*+([_^])\s*(?:\{([^{}]*)\}|([^\s{}\\]))")
_SIZE = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|scriptstyle|limits)(?![A-Za-z])")
_SPACE = re.compile(r"\\[,;:! ]|~|\\q?quad(?![A-Za-z])|&nbsp;")
_BRACES = re.compile(r"\{([^{}\\]*)\}")
_FUNCTION = re.compile(rf"\b({_FUNCTIONS.replace(' ', '|')}) (?=[(\[^⁰-⁹²³¹⁻])")
_SUM = re.compile(r"[\s+−/=-]")

_HIDDEN = {r"\{": "\x02", r"\}": "\x03", "_": "\x04", "^": "\x05"}
"""Placeholders for characters that must not be read as LaTeX. `_SHOWN` turns the placeholders into characters after all
commands are replaced."""

_SHOWN = str.maketrans({"\x02": "{", "\x03": "}", "\x04": "_", "\x05": "^", "-": "−"})


def write_formula(latex: str) -> str:
    """Write a formula in LaTeX as text. Returns the mark of a removed part if the formula has no plain form."""
    if len(latex) > MAX_LENGTH:
        return GAP
    text = _SPACE.sub(" ", _SIZE.sub("", latex.strip().rstrip(" \\")))
    text = text.replace(r"\{", _HIDDEN[r"\{"]).replace(r"\}", _HIDDEN[r"\}"])
    text = _COMMAND.sub(lambda found: _SYMBOLS.get(found[1], found[0]), text)
    for _ in range(MAX_DEPTH):  # the innermost braces come first
        before = text
        text = _ACCENT.sub(_write_accent, _NAMED.sub(lambda found: found[1] or "", text))
        text = _ROOT.sub(r"√(\1)", _FRACTION.sub(_write_fraction, text))
        text = _SCRIPT.sub(_write_script, text)
        text = _BRACES.sub(r"\1", text) if text == before else text
        if text == before:
            break
    if any(sign in text for sign in "\\&{}\x01"):
        return GAP
    return escape(" ".join(_FUNCTION.sub(r"\1", text.translate(_SHOWN)).split()))


def _write_accent(found: re.Match[str]) -> str:
    letter = found[2] or found[3]
    return _DOUBLE.get(letter, letter) if found[1] == "mathbb" else letter + _ACCENTS[found[1]]


def _write_fraction(found: re.Match[str]) -> str:
    above, below = found[1] or found[3] or "", found[2] or found[4] or ""
    return "/".join(f"({part.strip()})" if _SUM.search(part.strip()) else part.strip() for part in (above, below))


def _write_script(found: re.Match[str]) -> str:
    content = (found[2] if found[3] is None else found[3]).strip()
    if found[1] == "^":
        return raised(content) if raised(content) != content else _linear(_HIDDEN["^"], content)
    return content if content.isdigit() else _linear(_HIDDEN["_"], content)


def _linear(sign: str, content: str) -> str:
    if content in ("st", "nd", "rd", "th"):
        return content
    return f"{sign}{content}" if content.isalnum() else f"{sign}({content})"
