"""Plans as files: what is written is read again, and of every mistake the line is told."""

from pathlib import Path

import pytest

from crosscut.config import ConfigError, LayoutError
from crosscut.cutting import Plan, Rule, Style, Table, read_plan, write_plan
from crosscut.cutting.plan import expand, patterns

PLAN = Plan(
    tensor=(2, 4),
    rules={
        "blocks.*.q": Rule(style=Style.COLWISE, units=4, reason='goes "by heads"'),
        "blocks.*.qkv": Rule(style=Style.PACKED_COLWISE, parts=(8, 4, 4)),
        "blocks.*.o": Rule(style=Style.ROWWISE, columns=("blocks.*.q",)),
        "": Rule(style=Style.REPLICATE),
    },
    integers={"blocks.*": {"num_heads": (2, 1)}},
    tables={"blocks.*.slopes": Table(dimension=0, reason="one for each head")},
)
TEXT = """tensor = [2, 4]

[rules."blocks.*.q"]
style = "colwise"
units = 4

[integers."blocks.*"]
num_heads = [2, 1]

[tables."blocks.*.slopes"]
dimension = 0
"""


def test_a_written_plan_is_read_again(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == PLAN


def test_a_plan_written_by_hand_is_read(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(TEXT)
    plan = read_plan(tmp_path / "plan.toml")
    assert plan.rules == {"blocks.*.q": Rule(style=Style.COLWISE, units=4)}
    assert plan.values(4) == {"blocks.*": {"num_heads": 1}}
    assert plan.tables == {"blocks.*.slopes": Table(dimension=0)}


@pytest.mark.parametrize(
    ("line", "text", "told"),
    [
        (
            4,
            'style = "colwize"',
            r"`rules.blocks.\*.q.style` must be a style .* but is `colwize`. The nearest is `colw",
        ),
        (4, "style = 1", "must be the name of a style, but is 1"),
        (3, "", r"`rules.blocks.\*.q.style` must be given, but is missing"),
        (5, "unit = 4", "`.*unit` must be a key of a plan, but is unknown. The nearest is `units`"),
        (5, "units = -1", "units` must be at least 0, but is -1"),
        (5, "parts = [4]", "parts` must be given only with the style `packed_colwise` or `mla_kv_a_proj`, but"),
        (8, "num_heads = [2]", "`integers.*num_heads` must have a value for each of the 2 numbers of ranks .* has 1"),
        (8, "num_heads = 2", "num_heads` must be a list of whole numbers"),
        (11, 'dimension = "0"', "dimension` must be a whole number, but is '0'"),
        (1, "tensor = [2, 2]", "`tensor` must be the different numbers of ranks"),
        (1, "tensor = 2", "`tensor` must be a list of numbers of ranks, but is 2"),
        (1, 'tensor = [2, 4]\nq = "colwise"', "`q` must be a key of a plan, but is unknown"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, line: int, text: str, told: str) -> None:
    lines = TEXT.splitlines()
    lines[(line if text else 4) - 1] = text
    path = tmp_path / "plan.toml"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=told) as error:
        read_plan(path)
    assert str(error.value).startswith(f"{path}:{line + text.count(chr(10))}: ")


def test_files_that_are_not_toml_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a readable TOML file"):
        read_plan(tmp_path / "missing.toml")
    (tmp_path / "plan.toml").write_text("tensor = [")
    with pytest.raises(ConfigError, match="must be valid TOML"):
        read_plan(tmp_path / "plan.toml")


def test_a_packed_rule_needs_its_parts() -> None:
    with pytest.raises(ConfigError, match=r"`rules\.qkv.parts` must be the sizes of the layer's parts"):
        Plan(tensor=(2,), rules={"qkv": Rule(style=Style.PACKED_COLWISE)})
    with pytest.raises(ConfigError, match=r"`rules\.qkv.parts` must be sizes of at least 1"):
        Plan(tensor=(2,), rules={"qkv": Rule(style=Style.PACKED_COLWISE, parts=(4, 0))})


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"must be one of the plan's \(`tensor` = \[2, 4\]\), but is 3"):
        PLAN.values(3)


def test_a_star_stands_for_one_number() -> None:
    names = ["h.0.a", "h.11.a", "h.0.b", "h.0.1.a"]
    assert expand("h.*.a", names) == ["h.0.a", "h.11.a"]
    assert patterns(names) == {"h.*.a": ["h.0.a", "h.11.a"], "h.*.b": ["h.0.b"], "h.*.*.a": ["h.0.1.a"]}
    with pytest.raises(ConfigError, match=r"`h\.\*\.c` in a plan must name a module, but matches none"):
        expand("h.*.c", names)
