"""`crosscut verify --module`: the verdicts, the limits, and the user's mistakes."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.docs.test_code_blocks import python_blocks

OWN = """
import time
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), {"input": torch.ones(3, 4)}, torch.sum

def cut(module, mesh):
    parallelize_module(module, mesh.tensor.device_mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

def cut_wrong(module, mesh):
    cut(module, mesh)
    module[2].bias.data.mul_(2)

def cut_hanging(module, mesh):
    module[1].register_forward_hook(lambda *_: time.sleep(100 * mesh.tensor.rank))

def build_images():
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    return nn.Sequential(*layers), {"input": torch.randn(2, 1, 9, 10)}, torch.sum

def two():
    return build()[:2]

def renamed(module, mesh):
    return nn.Sequential(module)

def vector():
    return *build()[:2], torch.ravel

number = 3
"""
PLAN = """
tensor = [2]
rules.0 = { style = "colwise", reason = "goes to 2" }
rules.2 = { style = "rowwise", columns = ["0"] }
"""
IMAGES = """
grid = [1, 2]
rules.0 = { style = "spatial_split_input" }
rules.2 = { style = "spatial_gather_output" }
"""
NAMES = ("verify", "--module", "own:build", "--layout", "tensor=2")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "wrong.toml").write_text(PLAN.replace("colwise", "colwize"))
    (tmp_path / "images.toml").write_text(IMAGES)
    (tmp_path / "broken.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("own", "cuts"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_right_cut_is_proven(own, crosscut_here):
    done = crosscut_here(*NAMES, "--cut", "own:cut", "--json", status=0)
    told = json.loads(done.stdout)
    assert told["same"]
    assert told["reports"][0]["model"] == "Sequential (76 parameters)"
    assert "Running `own:build` and `own:cut` with your rights, for at most 600 s" in done.stderr
    (messages,) = (check for check in told["reports"][0]["checks"] if check["name"] == "messages")
    assert messages["told"] == "1 x all_reduce over tensor (12 elements)"


@pytest.mark.slow  # the quick test above starts ranks
def test_a_plan_of_images_is_proven(own, crosscut_here):
    names = ("verify", "--module", "own:build_images", "--plan", "images.toml")
    done = crosscut_here(*names, "--layout", "context=2", status=0)
    assert "Plan for a grid of 1 x 2 context ranks" in done.stdout
    assert "tensor 1 x context 2 x data 1 equals the uncut model" in done.stdout


@pytest.mark.slow  # the quick test above starts ranks
def test_wrong_cut_is_named(own, crosscut_here):
    done = crosscut_here(*NAMES, "--cut", "own:cut_wrong", status=1)
    assert "tensor 2 x data 1 DIFFERS from the uncut model" in done.stdout
    assert "The first difference is in the forward pass of 2." in done.stdout


@pytest.mark.slow  # the quick test above starts ranks
def test_the_program_of_the_page_is_proven(own, crosscut_here):
    page = (Path(__file__).parents[2] / "docs" / "verification.md").read_text(encoding="utf-8")
    (program,) = (block.code for block in python_blocks(page) if "parallelize_module(module, mesh" in block.code)
    Path("cuts.py").write_text(program)
    crosscut_here("verify", "--module", "cuts:build", "--cut", "cuts:cut", "--layout", "tensor=2", status=0)


@pytest.mark.slow  # the quick test above starts ranks
def test_plan_is_shown_and_proven(own, crosscut_here):
    done = crosscut_here(*NAMES, "--plan", "plan.toml", status=0)
    assert re.search(r"0 +colwise +goes to 2", done.stdout)
    assert "tensor 2 x data 1 equals the uncut model" in done.stdout
    assert "Running `own:build` with your rights" in done.stderr


@pytest.mark.slow  # starts ranks
def test_rule_that_matches_nothing_is_refused(own, crosscut_here):
    Path("plan.toml").write_text(PLAN.replace("rules.0", "rules.5").replace('["0"]', "[]"))
    done = crosscut_here(*NAMES, "--plan", "plan.toml", status=2)
    assert "`5` in a plan must name a module, but matches none. Correct or remove the line." in done.stderr


@pytest.mark.slow  # waits for the limit
def test_ranks_that_wait_for_one_another_end_with_the_limit(own, crosscut_here):
    done = crosscut_here(*NAMES, "--cut", "own:cut_hanging", "--seconds", "5", status=2)
    assert "The proof must end within 5 s, but rank " in done.stderr


@pytest.mark.slow  # every case starts ranks
@pytest.mark.parametrize(
    ("build", "cut", "message"),
    [
        (
            "two",
            "cut",
            "`build` must return a module, a mapping of its keyword inputs and a function that makes a loss",
        ),
        ("vector", "cut", "The loss must be a scalar tensor, but is (12,). Return a sum or a mean."),
        ("build", "renamed", "`cut` must keep the names of all parameters, but `0.0.bias` is in only one of the two"),
    ],
)
def test_functions_that_cannot_be_compared_are_refused(own, crosscut_here, build, cut, message):
    done = crosscut_here("verify", "--module", f"own:{build}", "--cut", f"own:{cut}", "--layout", "tensor=2", status=2)
    assert message in done.stderr


MISTAKES = {
    "--cut own:cut": "`--cut` must be given together with `--module`, which is missing. Add `--module`.",
    "--module own:build --cut own:cut": "`--layout` must say how many ranks share the module, but is missing.",
    "--module own:build --layout tensor=2": "`--cut` must name the function that cuts the module, but is missing.",
    "--module own:build --cut own:cut --plan plan.toml --layout tensor=2": "`--cut` must be given without `--plan`",
    "--plan plan.toml": "`--plan` must be given together with `--module`, which is missing. Add `--module`.",
    "--module own:build --plan none.toml --layout tensor=2": "`none.toml` must be a readable TOML file, but is not",
    "--module own:build --plan wrong.toml --layout tensor=2": "wrong.toml:3: `rules.0.style` must be a style of a plan",
    "--module own:build --plan plan.toml --layout tensor=4": "must be one of the plan's (`tensor` = [2]), but is 4.",
    "--module own:build --cut own:cut --layout tensor=1": "must have at least 2 tensor ranks, or 2",
    "--module own:build --cut own:cut --layout tensor=2,data=2": "must have at least 2 tensor ranks, or 2",
    "--module own:build --cut own:cut --layout tensor=2 --layers 3": "but `--layers` is one. Remove it.",
    "run.toml --module own:build --cut own:cut --layout tensor=2": "but `run.toml` is one. Remove it.",
    "--module build --cut own:cut --layout tensor=2": "`--module` must be a name such as package.module:function, but",
    "--module no.such:build --cut own:cut --layout tensor=2": "but there is no module `no`.",
    "--module own:nothing --cut own:cut --layout tensor=2": "`own` has no function of that name: `nothing`.",
    "--module own:build --cut own:number --layout tensor=2": "`own` has another thing of that name: `number`.",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistake_is_told_before_a_rank_starts(own, no_launch, crosscut_here, arguments):
    assert MISTAKES[arguments] in crosscut_here("verify", *arguments.split(), status=2).stderr


def test_error_of_the_module_itself_is_shown(own, no_launch, crosscut_here):
    arguments = ("--module", "broken:build", "--cut", "own:cut", "--layout", "tensor=2")
    assert "No module named 'no_such_library'" in crosscut_here("verify", *arguments, status=1).stderr
