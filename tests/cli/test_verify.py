"""`crosscut verify`: by the real command where what it starts is looked at, in this process where what it says is."""

import json
import sys

import pytest

from crosscut.training.speed.compilation import _has_cpp_compiler
from tests.cli.conftest import run_python

RUN = (
    "model.num_layers=1", "model.hidden_size=32", "model.num_heads=4", "model.vocab_size=300", "model.dropout=0.1",
    "model.max_sequence_length=32", "training.sequence_length=32",
)  # fmt: skip


def test_verify_prints_a_table_and_its_verdict(crosscut_here):
    done = crosscut_here("verify", *RUN, "--layout", "tensor=1", status=0)
    assert "blocks.0.attention.qkv" in done.stdout
    assert "tensor 1 x data 1 equals the uncut model" in done.stdout


@pytest.mark.slow
def test_verify_takes_several_layouts_and_answers_in_json(crosscut_here):
    done = crosscut_here(
        "verify", *RUN, "--layout", "tensor=1,data=1", "--layout", "tensor=2,sequence_parallel=true", "--json", status=0
    )
    answer = json.loads(done.stdout)
    assert answer["same"] is True
    assert [report["layout"] for report in answer["reports"]] == [
        "tensor 1 x data 1",
        "tensor 2 x data 1, sequence parallel",
    ]


@pytest.fixture
def layouts_of(crosscut_here, monkeypatch):
    """Function that returns the layouts that a command would verify."""

    def find(*arguments: str) -> list[str]:
        found = []
        monkeypatch.setattr("crosscut.verification.verify_runs", lambda runs: found.extend(runs) or sys.exit(0))
        crosscut_here(*arguments, status=0)
        return [str(run.layout) for run in found]

    return find


def test_a_layout_that_is_given_stands_in_for_one_that_the_model_does_not_allow(crosscut_here, layouts_of):
    of_three = ("verify", *RUN, "model.hidden_size=30", "model.num_heads=3")
    refused = crosscut_here(*of_three, "layout.tensor=2")
    assert "`layout.tensor` must divide `model.num_heads` (3), but is 2." in refused.stderr
    assert layouts_of(*of_three, "layout.tensor=2", "--layout", "tensor=1") == ["tensor 1 x data 1"]


def test_a_layout_that_is_given_does_not_hide_a_mistake_in_the_runs_own(crosscut_here):
    for mistake in ("layout.tenser=2", "layout.tensor=two"):
        refused = crosscut_here("verify", *RUN, mistake, "--layout", "tensor=1", status=2)
        assert mistake.partition("=")[0] in refused.stderr


ON_ONE_RANK_ALONE = [
    ("training.compile=on",),  # with dropout, which the tensor ranks of the demo would drop from compiled layers
    ("training.precision=float8", "model.num_heads=6", "model.hidden_size=48"),
    ("training.precision=float8", "model.num_heads=6", "model.hidden_size=96", "--hidden", "48"),
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ON_ONE_RANK_ALONE, ids=" ".join)
def test_nothing_else_that_the_runs_own_layout_forbids_stands_in_the_way(crosscut, arguments):
    if "training.compile=on" in arguments and not _has_cpp_compiler():
        pytest.skip("inductor needs a C++ compiler on the CPU")
    crosscut("verify", *RUN, "layout.tensor=2", *arguments, status=2)
    crosscut("verify", *RUN, "layout.tensor=2", *arguments, "--layout", "tensor=1", timeout=300, status=0)


@pytest.mark.slow
def test_the_option_that_a_report_names_for_the_runs_precision_has_it(crosscut_here):
    arguments = ("verify", *RUN, "model.hidden_size=64", "training.precision=float8", "--layout", "tensor=2", "--json")
    left_out, *_ = json.loads(crosscut_here(*arguments).stdout)["reports"][0]["left_out"]
    option = left_out.partition("(verify it with ")[2].partition(",")[0].split()
    done = crosscut_here(*arguments, *option, status=0)
    (report,) = json.loads(done.stdout)["reports"]
    assert report["precision"] == "float8"
    assert not any("float8" in told for told in report["left_out"])


def forward_of_mixed_heads(self, x, *_):
    """Attention whose keys and values of one head are not beside each other: right on one rank only."""
    query, key_value = self.qkv(x)
    k, v = key_value.unflatten(-1, (2, -1, self.head_size)).unbind(-3)
    q = query.unflatten(-1, (-1, self.head_size))
    heads = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return self.output(heads.transpose(1, 2).flatten(2))


def faulty_rank(function, arguments):
    """In place of a rank's work: the same with a fault in the model."""
    from crosscut.launch import processes
    from crosscut.model.sublayers.attention import SelfAttention

    SelfAttention.forward = forward_of_mixed_heads  # in a process of its own
    return processes._run_rank(function, arguments)


SHARDED = ("layout.sharding=zero3", "layout.context_attention=gather", "model.max_sequence_length=32")


def test_a_layout_that_is_given_replaces_the_sizes_of_axes_alone(layouts_of):
    asked = ("verify", *RUN, *SHARDED, "layout.tensor=2", "--layout", "data=2")
    assert layouts_of(*asked) == ["tensor 1 x data 2, zero3"]


@pytest.mark.parametrize(
    ("settings", "layout", "told"),
    [
        (("layout.data=4", "layout.sharding=zero3", "layout.shard_group=4"), "data=2",
         "`layout.shard_group` must divide `layout.data` (2), but is 4."),
        (("layout.pipeline=2", "layout.stages_per_rank=2", "model.num_layers=4"), "data=2",
         "`layout.stages_per_rank` must be 1 without a pipeline, but is 2."),
        (("layout.context=2", "layout.context_attention=ring", "model.dropout=0"), "context=2,sharding=zero4",
         "`layout.sharding` must be"),
        (("layout.context_attention=ring",), "context=2",
         '`model.dropout` must be 0 with layout.context_attention="ring", but is 0.1.'),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit_the_runs_other_settings_is_refused(crosscut_here, settings, layout, told):
    assert told in crosscut_here("verify", *RUN, *settings, "--layout", layout, status=2).stderr


def test_difference_exits_with_1_and_names_the_module(crosscut_here, monkeypatch):
    monkeypatch.setattr("crosscut.launch.processes._run_rank", faulty_rank)
    done = crosscut_here("verify", *RUN, "--layout", "tensor=2", status=1)
    assert "tensor 2 x data 1 DIFFERS from the uncut model" in done.stdout
    assert "blocks.0.attention" in done.stdout.partition("The first difference is in the forward pass of ")[2]


def test_layout_with_an_unknown_axis_names_the_nearest(crosscut_here):
    done = crosscut_here("verify", "--layout", "tensr=2", status=2)
    assert "`layout.tensr` must be a key of `layout`, but there is no such key. The nearest is" in done.stderr


def test_layout_that_the_model_does_not_allow_is_refused(crosscut_here):
    done = crosscut_here("verify", *RUN, "--layout", "tensor=3", status=2)
    assert "`layout.tensor` must divide `model.num_heads` (4), but is 3. Try 1, 2 or 4." in done.stderr


@pytest.mark.slow
def test_under_torchrun_the_started_ranks_verify_every_layout(tmp_path):
    layouts = ("--layout", "tensor=2", "--layout", "data=2")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "crosscut", "verify"]
    done = run_python(*command, *RUN, *layouts, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [report["layout"] for report in answer["reports"]] == ["tensor 2 x data 1", "tensor 1 x data 2"]
