"""Plans of transformers' models, held against the proof."""

import json

import pytest

from tests.benchmarks.conftest import run_program

pytestmark = pytest.mark.slow  # two ranks import transformers


def test_right_and_wrong_plans_are_told_apart():
    kinds = ("llama", "gpt2", "deepseek_v2", "longcat_flash", "apertus", "hrm_text", "doge", "helium")
    told = json.loads(run_program("cutting/own_plans.py", *kinds, "--tensor", 2, "--json", timeout=590).stdout)
    findings = {finding["kind"]: finding for finding in told["findings"]}
    assert {kind: finding["verdict"] for kind, finding in findings.items()} == {
        "llama": "right",
        "gpt2": "no plan",
        "deepseek_v2": "right",
        "longcat_flash": "right",
        "apertus": "wrong",
        "hrm_text": "wrong",
        "doge": "refused",
        "helium": "not built",
    }
    assert findings["apertus"]["told"].startswith("`model.layers.1.mlp.act_fn`, backward: Each tensor rank holds only")
    assert findings["hrm_text"]["told"].startswith("`model.L_module.layers.0.self_attn.q_proj`, forward")
    assert told["left_whole"] == {"llama": []}
