"""The server of the page: what it answers, and whom."""

import hashlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest

from crosscut.config import ConfigError
from crosscut.watch.found import Runs
from crosscut.watch.pages import PAGE, live_page, write_page
from crosscut.watch.server import WatchServer
from tests.watch.runs import HOSTILE, write_rich_run, write_run


@contextmanager
def serving(*places: Path) -> Iterator[WatchServer]:
    with WatchServer(Runs([str(place) for place in places]), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(port: int, path: str = "/poll", *, method: str = "GET", host: str = "127.0.0.1") -> SimpleNamespace:
    """Send a request, and return the answer with its body."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host)
        connection.endheaders()
        with connection.getresponse() as answer:
            return SimpleNamespace(status=answer.status, headers=answer.headers, body=answer.read())


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[WatchServer]:
    with serving(write_run(tmp_path_factory.mktemp("runs") / "one", 5).parent) as server:
        yield server


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8080", "LOCALHOST", "[::1]:7"])
def test_names_of_this_machine_are_answered(server, host):
    assert ask(server.server_port, host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "", "localhost:x"]
)
def test_other_names_are_refused(server, host):
    assert ask(server.server_port, host=host).status == 421
    assert ask(server.server_port, "/", host=host).status == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_other_methods_are_refused(server, method):
    answer = ask(server.server_port, method=method)
    assert answer.status == 405 and answer.headers["Allow"] == "GET"


@pytest.mark.parametrize("path", ["/metrics.jsonl", "/../etc/passwd", "/poll/"])
def test_there_are_no_other_addresses(server, path):
    assert ask(server.server_port, path).status == 404


@pytest.mark.parametrize("query", ["run=", "run=x&at=y", "at=1&run=2", "run", "&&&", "run=%ff&at=%00"])
def test_questions_that_no_page_asks_are_answered(server, query):
    answer = ask(server.server_port, f"/poll?{query}")
    assert answer.status == 200 and json.loads(answer.body)["told"] == {}


def test_only_this_machine_is_answered(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_no_other_page_may_show_or_read_the_answers(server):
    headers = ask(server.server_port, "/").headers
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in headers


def test_a_port_in_use_is_told(server):
    with pytest.raises(
        ConfigError, match=rf"`--port` must be free, but {server.server_port} is in use\. Choose another"
    ):
        WatchServer(Runs([]), server.server_port)


def test_new_runs_appear(tmp_path, monkeypatch):
    monkeypatch.setattr("crosscut.watch.found._SECONDS_BETWEEN", 0)
    runs = Runs([str(tmp_path)])
    assert runs.refresh() == []
    write_run(tmp_path / "b-9", 1)
    write_run(tmp_path / "group" / "b-9", 1)
    write_run(tmp_path / "b-10", 1)
    assert [run.name for run in runs.refresh()] == [f"{tmp_path.name}/b-9", f"{tmp_path.name}/b-10", "group/b-9"]
    assert [run.id for run in runs.refresh()] == [run.id for run in Runs([f"{tmp_path}/b-*", str(tmp_path)]).refresh()]


def test_runs_that_are_too_many_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("crosscut.watch.found._SECONDS_BETWEEN", 0)
    monkeypatch.setattr("crosscut.watch.found._MOST", 2)
    for number in range(4):
        write_run(tmp_path / f"run-{number}", 1)
    runs = Runs([str(tmp_path)])
    for _ in range(2):
        assert [run.name for run in runs.refresh()] == ["run-0", "run-1"]
        assert runs.listed()["left_out"] == 2


def test_a_place_without_a_folder_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"must be the folder of a run, a folder that holds runs, or a pattern"):
        Runs([str(tmp_path), str(tmp_path / "x*")]).require_any()
    with pytest.raises(ConfigError, match="must be the folder of a run or hold runs, but does not"):
        write_page([str(tmp_path)], tmp_path / "page.html")


def test_the_page_names_no_other_address_and_no_text_of_a_run_is_markup(tmp_path):
    write_page([str(write_rich_run(tmp_path / "<script>x"))], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    (block,) = re.findall(r'<script type="application/json" id="frozen">(.*?)</script>', html)
    assert HOSTILE in json.loads(block)["told"].popitem()[1]["parts"]["samples"][-1]["text"] and "<" not in block
    for page in (html, live_page()):
        assert not re.search(r'(src|href)="(?!data:|#)', page.replace(block, ""))
        assert "default-src 'none'" in page and "unsafe" not in page
    assert "connect-src" not in html and "connect-src 'self'" in live_page()


def test_the_charts_are_those_of_the_stated_version():
    vendor = PAGE / "vendor"
    stated = dict(re.findall(r"`([\w.]+)` \| `(\w{64})`", (vendor / "README.md").read_text()))
    assert stated.keys() == {path.name for path in vendor.iterdir()} - {"README.md"}
    for name, digest in stated.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest
    assert "(v1.6.32)" in (vendor / "uPlot.iife.min.js").read_text()[:100]


@pytest.mark.slow  # starts processes
def test_ctrl_c_ends_the_command_with_status_0(tmp_path):
    command = [sys.executable, "-m", "crosscut", "watch", str(write_run(tmp_path / "run", 3)), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", lines[0])[1])
        assert f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}" in lines[1]
        assert ask(port).status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


@pytest.mark.slow  # starts processes
def test_the_page_beside_a_training_ends_with_it(tmp_path):
    command = "from pathlib import Path; from crosscut.watch.beside import page_beside\n"
    command += f"with page_beside(Path({str(tmp_path / 'not yet')!r})): print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as training:
        port = int(re.search(r":(\d+)/", training.stdout.readline())[1])
        assert json.loads(ask(port).body)["runs"] == []
        write_run(tmp_path / "not yet", 3)
        training.kill()
    for _ in range(200):
        try:
            ask(port)
        except ConnectionError:
            break
    else:
        pytest.fail("the page outlives the training")
