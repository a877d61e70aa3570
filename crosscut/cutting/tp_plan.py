"""Plan of a cut from the `tp_plan` of a transformers model."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from crosscut.config import ConfigError
from crosscut.cutting.plan import OURS, Plan, Rule, Style, expand, patterns

_OTHER_NAMES = {"colwise_rep": Style.COLWISE_GATHER_OUTPUT, "rowwise_rep": Style.ROWWISE_SPLIT_INPUT}
"""Second names that transformers has for styles."""
_REASON = "the model's own tp_plan"


def from_tp_plan(module: nn.Module, tp_plan: Mapping[str, str], tensor: Sequence[int] = (2, 4)) -> Plan:
    """Make a plan of a `tp_plan`: styles by the names of modules, in which `*` may stand for a number. In transformers
    5.24, `module._resolve_parallel_plans(DistributedConfig(tp_size=2))[0]` returns the plan of a model.

    transformers packs two matrices of one size in a layer of the style `packed_colwise`. The layers cut by columns that
    lead to a layer cut by rows are those of the same parent module, because a `tp_plan` does not say. It also does not
    say which integers go by head: a model of transformers that has a `tp_plan` needs none.

    Raises `ConfigError` if a name matches no module, or has a style that Crosscut cannot cut by.
    """
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    rules: dict[str, Rule] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for pattern, word in tp_plan.items():
        if pattern in parameters and pattern.rpartition(".")[0] in tp_plan:
            continue  # the rule of the module says how its parameters are cut
        style = _style(pattern, word)
        for name in expand(pattern, names):
            rules[name] = Rule(style=style, reason=_REASON, parts=_parts(module, name, style))
    for name, rule in rules.items():
        if rule.style is Style.ROWWISE:
            rules[name] = Rule(style=rule.style, reason=_REASON, columns=_columns_beside(name, rules))
    return Plan(tensor=tuple(tensor), rules=_by_pattern(rules, names))


def _style(name: str, word: str) -> Style:
    known = {str(style): style for style in Style if style not in OURS} | _OTHER_NAMES
    if word not in known:
        raise ConfigError(
            f"`{name}` must have a style that Crosscut can cut by, but has `{word}`. Remove the name from the plan, "
            "and with it the names of the layers that are cut together with it."
        )
    return known[word]


def _parts(module: Any, name: str, style: Style) -> tuple[int, ...]:
    """Return the sizes of the parts of a layer's output, for the styles that need them."""
    size = int(getattr(module.get_submodule(name), "out_features", 0))
    if style is Style.PACKED_COLWISE:
        return size // 2, size - size // 2
    if style is Style.MLA_KV_A_PROJ:
        last = int(module.config.get_text_config().qk_rope_head_dim)
        return size - last, last
    return ()


def _columns_beside(name: str, rules: Mapping[str, Rule]) -> tuple[str, ...]:
    parent = name.rpartition(".")[0]
    styles = (Style.COLWISE, Style.PACKED_COLWISE)
    return tuple(other for other, rule in rules.items() if rule.style in styles and other.rpartition(".")[0] == parent)


def _by_pattern(rules: Mapping[str, Rule], names: Sequence[str]) -> dict[str, Rule]:
    """Join the rules of the modules that differ only in a number."""
    joined: dict[str, Rule] = {}
    for pattern, alike in patterns(rules).items():
        general = {_general(rules[name]) for name in alike}
        if len(general) == 1 and expand(pattern, names) == sorted(alike, key=names.index):
            joined[pattern] = general.pop()
        else:
            joined |= {name: rules[name] for name in alike}
    return joined


def _general(rule: Rule) -> Rule:
    """Return a rule with patterns in place of the names of layers."""
    return Rule(style=rule.style, reason=rule.reason, parts=rule.parts, columns=tuple(patterns(rule.columns)))
