"""docs/running.md, docs/elastic.md and their jobs in examples/jobs: the jobs parse, and the one for Slurm does what the
page says.
"""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from crosscut.checkpoint import list_checkpoints
from crosscut.cli.main import _EXIT_INTERRUPTED, _EXIT_PIPE, EXIT_DAMAGED, EXIT_REQUEUE, main
from crosscut.data import read_documents
from crosscut.training.elastic import Restart
from tests.cli.conftest import TINY

ROOT = Path(__file__).parents[2]
PAGE, ELASTIC = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("running.md", "elastic.md"))
JOBS = {file.name: file.read_text(encoding="utf-8") for file in sorted((ROOT / "examples" / "jobs").iterdir())}
BLOCKS = [re.findall(r"^ *```sh\n(.*?)^ *```$", page, flags=re.MULTILINE | re.DOTALL) for page in (PAGE, ELASTIC)]
SCRIPTS = [*(job for name, job in JOBS.items() if name.endswith(".sh")), *BLOCKS[0], *BLOCKS[1]]


@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_shell_scripts_parse(script):
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", [name for name in JOBS if name.endswith(".yaml")])
def test_objects_of_kubernetes_parse_and_mount_the_volumes_of_their_pod(name):
    job = list(yaml.safe_load_all(JOBS[name]))[-1]
    pod = job["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]} == volumes


def test_every_job_has_its_page():
    for name in JOBS:
        assert f"(../examples/jobs/{name})" in (ELASTIC if name.startswith("elastic") else PAGE), name


def test_elastic_jobs_set_what_an_elastic_run_needs():
    for text in (ELASTIC, JOBS["elastic-slurm.sh"]):
        assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text.partition("torchrun --nnodes")[0]
    assert '{name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE, value: "1"}' in JOBS["elastic-kubernetes.yaml"]
    for row in ("`before`, `after`", "`restored_from`", "`ranks`, `idle_ranks`", "`steps_lost`", "`seconds_lost`"):
        assert f"\n| {row} |" in ELASTIC
    assert {field.name for field in dataclasses.fields(Restart)} == {
        "step", "before", "after", "restored_from", "ranks", "idle_ranks", "steps_lost", "seconds_of_steps_lost",
        "last_step_at",
    }  # fmt: skip


def test_page_and_jobs_know_the_exit_status():
    assert f"exits with {EXIT_REQUEUE}" in PAGE
    assert f"{EXIT_REQUEUE}) scontrol requeue" in JOBS["slurm.sh"]
    assert f"values: [{EXIT_REQUEUE}]" in JOBS["kubernetes.yaml"]


def rows_of(heading: str) -> dict[str, list[str]]:
    """Rows of the table under a heading of the page, by their first cell."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {first: others for first, *others in cells[2:]}


def test_page_lists_every_exit_status_of_the_command():
    statuses = {int(word) for cell in rows_of("Exit statuses") for word in cell.split(", ")}
    of_signals = {128 + signal.SIGUSR1, 128 + signal.SIGTERM}
    assert statuses == {0, 1, 2, EXIT_DAMAGED, EXIT_REQUEUE, _EXIT_INTERRUPTED, _EXIT_PIPE} | of_signals
    for status in statuses - {0} - of_signals:
        assert f"- {status} after" in (main.__doc__ or ""), status


def test_page_states_what_signals_do():
    """`tests/cli/test_stopping.py` shows that runs do so."""
    rows = rows_of("Signals")
    assert rows["SIGTERM, SIGUSR1"] == [
        f"finishes the step, writes a checkpoint, exits with {EXIT_REQUEUE}",
        f"ends at once with {128 + signal.SIGTERM} or {128 + signal.SIGUSR1}",
    ]
    assert rows["SIGINT (Ctrl-C)"] == [
        f"finishes the step, writes a checkpoint, exits with {_EXIT_INTERRUPTED}",
        f"ends at once with {_EXIT_INTERRUPTED}",
    ]
    assert rows["a second SIGINT"] == [f"ends at once with {_EXIT_INTERRUPTED}, without a checkpoint", ""]
    assert 128 + signal.SIGINT == _EXIT_INTERRUPTED


SRUN = """#!/bin/bash
[ "$1" = --label ] && shift
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 "$@" &
    tasks="$tasks $!"
done
echo $tasks > tasks
worst=0
for task in $tasks; do
    wait $task
    status=$?
    [ $status -gt $worst ] && worst=$status
done
exit $worst
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) echo 127.0.0.1 ;;
    requeue) echo "$2" >> requeued ;;
esac
"""


def submit(folder: Path, script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-c", script], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "a",
             "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def prepare_stand_ins(folder: Path, crosscut: str) -> None:
    """Write stand-ins for Slurm's two commands, which start the tasks and note the job, and for `crosscut`."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "crosscut": f"#!/bin/bash\n{crosscut}\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("status", "starts", "goes_back"),
    [(0, 0, False), (2, 0, False), (65, 0, False), (75, 99, True), (1, 0, True), (137, 19, True), (137, 20, False)],
)
def test_slurm_script_requeues_a_job_whose_rank_has_crashed(tmp_path, monkeypatch, status, starts, goes_back):
    prepare_stand_ins(tmp_path, f"[ $RANK = 0 ] && exit {status}; exit {min(status, 1)}")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(starts))
    job = submit(tmp_path, JOBS["slurm.sh"])
    job.communicate(timeout=60)
    assert (job.returncode, (tmp_path / "requeued").exists()) == (status, goes_back)


@pytest.mark.slow
def test_slurm_script_requeues_a_job_that_has_stopped_and_completes_it(tmp_path):
    """The ranks are real."""
    prepare_stand_ins(tmp_path, f'exec {sys.executable} -m crosscut "$@"')
    script = JOBS["slurm.sh"]
    assert "layout.tensor=8 layout.data=2" in script
    (tmp_path / "run.toml").write_text("")
    text = next(iter(read_documents(["builtin:state-of-the-union"], text_key="text"))).text
    (tmp_path / "book.txt").write_text("\n\n".join([text] * 10))
    options = " ".join([*TINY, "layout.tensor=2", "data.text=book.txt", "output.folder=run", "training.device=cpu"])
    script = script.replace("layout.tensor=8 layout.data=2", f"{options} training.steps=$STEPS")
    first = submit(tmp_path, script.replace("$STEPS", "100000"))
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count('"loss"') > 2):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for task in (tmp_path / "tasks").read_text().split():
        os.kill(int(task), signal.SIGUSR1)
    out, errors = first.communicate(timeout=60)
    assert first.returncode == EXIT_REQUEUE, out + errors
    assert errors.count("crosscut: The run was asked to stop") == 1
    assert (tmp_path / "requeued").read_text() == "4711\n"
    step = int(list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name.removeprefix("step-"))
    second = submit(tmp_path, script.replace("$STEPS", str(step + 2)))
    out, errors = second.communicate(timeout=120)
    assert second.returncode == 0, out + errors
    assert (tmp_path / "requeued").read_text() == "4711\n", "what is complete is not requeued"
