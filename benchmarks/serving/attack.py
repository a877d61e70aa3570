"""Honest streams of a server, alone and with attackers among the clients.

    python benchmarks/serving/attack.py [--streams 1000] [--attackers 50] [--turns 5] [--json FILE]

The command trains and exports a tiny model, serves it with `crosscut serve`, and has all honest clients stream a text
at the same time: in turns alone, and with attackers that begin first and go on until the last honest stream has ended.
Each attacker repeats one kind of attack (`ATTACKS`). The table shows how long all honest streams together took, and how
many of them were lost: streams that did not end as they should. Two figures are goals: no stream is lost, and with
attackers the streams take at most 1.5 times as long.

Other work on the machine changes the times. Each attacked turn is therefore compared with the two turns alone next to
it, and the result is the median of these ratios. On a busy machine, many short turns (`--streams 200 --attackers 10`)
tell more than few long ones.

Clients and server share the machine's cores, so the work of the attackers' own clients counts against the server.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line, run_crosscut, write_figures
from benchmarks.machine import describe_machine, print_machine
from benchmarks.processes import port_of, session, told_in

TOKENS = 16
"""Tokens of each honest stream."""
SLOWEST = 1.5
"""Goal: seconds of the honest streams with attackers, divided by their seconds alone."""
_TEMPLATE = (
    "{% set last = messages[-1].content %}"
    "{% if last == 'slow' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if last == 'large' %}{{ 'a' * 10000000000 }}{% endif %}"
    "{{ last }}"
)
_TEXT, _CHAT = "/v1/completions", "/v1/chat/completions"
_FIELD = b'{"model": "model", "prompt": "a", "x": %s}'
_LARGE = 8_000_000
"""Bytes of a large request."""
_HONEST = {"prompt": "The state of", "max_tokens": TOKENS, "stream": True, "logit_bias": {"0": -100}}


@asynccontextmanager
async def _connected(
    port: int, *, limit: int = 1 << 16
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connection to the server, with a buffer of `limit` bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    try:
        yield reader, writer
    finally:
        writer.close()


async def honest_stream(port: int, number: int) -> bool:
    """Stream one text. Returns whether it ended as it should, with all its tokens."""
    try:
        async with _connected(port) as (reader, writer):
            writer.write(request(_TEXT, _HONEST | {"seed": number}))
            answer = await asyncio.wait_for(reader.read(-1), 600)
    except (OSError, TimeoutError):
        return False
    return answer.count(b'"finish_reason":"length"') == 1 and b"data: [DONE]" in answer


def request(path: str, body: Any, *, length: int | None = None) -> bytes:
    """One POST request as bytes. The server closes the connection after its answer."""
    content = body if isinstance(body, bytes) else json.dumps({"model": "model", **body}).encode()
    size = len(content) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + content


async def _ask(port: int, content: bytes, *, read: int = -1) -> None:
    """Send a request and read the answer, or only its first `read` bytes before leaving."""
    async with _connected(port) as (reader, writer):
        writer.write(content)
        with suppress(asyncio.IncompleteReadError):
            await (reader.read(-1) if read < 0 else reader.readexactly(read))


async def _never_read(port: int) -> None:
    """Ask for a long text and read nothing of it for half a minute."""
    async with _connected(port, limit=1) as (_, writer):
        writer.write(request(_TEXT, _HONEST | {"n": 16, "logprobs": 5, "max_tokens": 100}))
        await asyncio.sleep(30)


async def _send_slowly(port: int) -> None:
    """Send a request byte by byte."""
    async with _connected(port) as (_, writer):
        for byte in request(_TEXT, _HONEST):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)


def _asking(path: str, body: Any, **how: Any) -> Callable[[int], Awaitable[None]]:
    content = request(path, body)
    return lambda port: _ask(port, content, **how)


def _chat(text: str, **how: Any) -> Callable[[int], Awaitable[None]]:
    return _asking(_CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 2}, **how)


ATTACKS: dict[str, Callable[[int], Awaitable[None]]] = {
    "a template that runs for ever": _chat("slow"),
    "a template that takes 10 GB": _chat("large"),
    "leaving while a template runs": lambda port: asyncio.wait_for(_chat("slow")(port), 0.2),
    "16 stop strings at the limit": _asking(_TEXT, _HONEST | {"stop": ["a" * (1000 - i) for i in range(16)]}),
    "a stop string of two million characters": _asking(_TEXT, _HONEST | {"stop": "a" * 2_000_000}),
    "ids that the model does not have": _asking(_TEXT, _HONEST | {"prompt": [10**9]}),
    "fields nested 2,000 deep": _asking(_TEXT, _FIELD % (b"[" * 2000 + b"]" * 2000)),
    "8 MB of empty lists": _asking(_TEXT, _FIELD % (b"[" + b"[]," * (_LARGE // 3) + b"0]")),
    "a prompt of 8 MB": _asking(_TEXT, _HONEST | {"prompt": "word " * (_LARGE // 5)}),
    "128 prompts of 60 kB": _asking(_TEXT, _HONEST | {"prompt": ["word " * 12_000] * 128}),
    "a prompt of three million ids": _asking(_TEXT, _HONEST | {"prompt": [5] * (_LARGE // 3)}),
    "a chat of 8 MB": _chat("word " * (_LARGE // 5)),
    "prompts as long as they may be": _asking(_TEXT, _HONEST | {"prompt": ["a" * 100] * 20, "max_tokens": 1}),
    "a length of 20 digits and no body": lambda port: _ask(port, request(_TEXT, b"", length=10**19)),
    "leaving after the first bytes": _asking(_TEXT, _HONEST | {"n": 8, "max_tokens": 100}, read=20),
    "never reading": _never_read,
    "sending slowly": _send_slowly,
}
"""Functions that an attacker calls again and again, by the name of the attack."""


async def _attack(port: int, kind: str, counts: dict[str, int]) -> None:
    while True:
        with suppress(OSError, TimeoutError):
            await ATTACKS[kind](port)
        counts[kind] += 1
        await asyncio.sleep(0.05)


async def _settled(port: int) -> None:
    """Wait until the server has no text left."""
    while True:
        async with _connected(port) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            if b'"running":0,"waiting":0' in await reader.read(-1):
                return
        await asyncio.sleep(0.1)


async def one_turn(port: int, *, streams: int, attackers: int, first: int = 0) -> dict[str, Any]:
    """Run all honest streams at once. Returns seconds, lost streams and the number of attacks. `first` is the index of
    the first attacker's kind of attack.
    """
    counts = dict.fromkeys(ATTACKS, 0)
    kinds = islice(cycle(ATTACKS), first, first + attackers)
    attacks = [asyncio.create_task(_attack(port, kind, counts)) for kind in kinds]
    if attackers:
        await asyncio.sleep(2)
    began = time.perf_counter()
    ended = await asyncio.gather(*(honest_stream(port, i) for i in range(streams)))
    seconds = time.perf_counter() - began
    for task in attacks:
        task.cancel()
    await asyncio.gather(*attacks, return_exceptions=True)
    await _settled(port)
    return {"seconds": seconds, "lost": ended.count(False), "attacks": counts}


def make_model(folder: Path) -> Path:
    """Train a tiny model for a moment and export it, with a chat template that an attacker can misuse."""
    run, model = folder / "run", folder / "model"
    sizes = ("model.num_layers=2", "model.hidden_size=64", "model.num_heads=4", "data.vocab_size=512")
    steps = ("training.steps=2", "optimizer.warmup_steps=1", "training.validate_every=0", "output.sample_tokens=0")
    run_crosscut("train", "recipe=small", *sizes, *steps, "layout.tensor=1", f"output.folder={run}")
    run_crosscut("checkpoint", "export", str(run), str(model))
    (model / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return model


@contextmanager
def served(model: Path, log: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A server, as its process and its port, once it listens."""
    command = [sys.executable, "-m", "crosscut", "serve", str(model), "--port", "0", "--device", "cpu"]
    with session(command, log) as process:
        yield process, port_of(process, lambda: told_in(log))
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)


def measure(*, streams: int, attackers: int, turns: int, model: Path | None = None) -> dict[str, Any]:
    """Run the turns against one server: alone and attacked alternately, after one turn that does not count. Without
    `model`, a tiny model is trained.
    """
    with tempfile.TemporaryDirectory() as scratch:
        model, log = model or make_model(Path(scratch)), Path(scratch) / "log.txt"
        with served(model, log) as (process, port):
            asyncio.run(one_turn(port, streams=min(streams, 50), attackers=0))
            results: dict[str, list[dict[str, Any]]] = {"alone": [], "attacked": []}
            for name in ("alone", *("attacked", "alone") * turns):
                number = attackers if name == "attacked" else 0
                first = len(results["attacked"]) * attackers  # a few attackers try all kinds over several turns
                told = asyncio.run(one_turn(port, streams=streams, attackers=number, first=first))
                results[name].append(told)
                print(f"{name}: {told['seconds']:.1f} s, {told['lost']} lost", flush=True)
            assert process.poll() is None, "the server has ended"
    alone, attacked = ([one["seconds"] for one in results[name]] for name in ("alone", "attacked"))
    ratios = [2 * one / sum(near) for one, near in zip(attacked, pairwise(alone), strict=True)]
    lost = sum(one["lost"] for one in results["attacked"])
    ratio = statistics.median(ratios)
    return {"turns": results, "ratios": ratios, "ratio": ratio, "lost": lost, "goals": ratio <= SLOWEST and not lost}


def main() -> int:
    """Measure, print the table and return 0 if both goals are met."""
    parser = command_line(__doc__, figures="write")
    parser.add_argument("--streams", type=int, default=1000, help="honest streams at the same time")
    parser.add_argument("--attackers", type=int, default=50, help="attackers, of all kinds")
    parser.add_argument("--turns", type=int, default=5, help="attacked turns, with turns alone between them")
    options = parser.parse_args()
    print_machine("torch", "starlette")
    measured = measure(streams=options.streams, attackers=options.attackers, turns=options.turns)
    attacks = {kind: sum(one["attacks"][kind] for one in measured["turns"]["attacked"]) for kind in ATTACKS}
    for kind, number in attacks.items():
        print(f"{number:>8,}  {kind}")
    verdict = "met" if measured["goals"] else "NOT met"
    print(
        f"{options.streams:,} streams with {options.attackers} attackers: {measured['ratio']:.2f} times as long as "
        f"alone ({min(measured['ratios']):.2f} to {max(measured['ratios']):.2f}; goal {SLOWEST}), {measured['lost']} "
        f"lost (goal 0): {verdict}"
    )
    machine = describe_machine("torch", "starlette")
    write_figures(options.json, {"machine": machine, "streams": options.streams, **measured})
    return 0 if measured["goals"] else 1


if __name__ == "__main__":
    sys.exit(main())
