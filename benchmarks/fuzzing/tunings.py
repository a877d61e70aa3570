"""Commands on encoders and fine-tunings that cases damage: files of tasks, conversations, tuned runs, masked text."""

from collections.abc import Callable

from benchmarks.fuzzing.cases import Base
from benchmarks.fuzzing.valid_tunings import CHAT, ENCODER, QUESTIONS, STEP, TABLE

_MODEL = {ENCODER: ENCODER}
_RUN_FILES = ("*/*.json*", "*/config.toml", "*/data/*", "*/tokens/*")
Options = Callable[..., tuple[str, ...]]
"""Function that returns the long options of a command."""


def tasks(options: Options) -> tuple[Base, ...]:
    """Fine-tunings for a task: their files, their settings, and the folders of their runs."""
    begun = {"tuned": "tuned-begun"}
    return (
        *(_task(name) for name in ("sst-2", "cola", "mnli", "qqp")),
        Base("table", ("finetune", "table", "--model", ENCODER, *TABLE, "--output", "out", *STEP), _files("table"),
             ("*.tsv",), kept=2, words=(*options("finetune", "table"), "--label=kind", "--labels=war,peace"), weight=2),
        Base("rows", ("finetune", "table", "--model", ENCODER, "--train", "train.jsonl", "--dev", "dev.jsonl",
                      *TABLE[4:], "--output", "out", *STEP), _files("table", ".jsonl"), ("*.jsonl",), weight=2),
        Base("squad", ("finetune", "squad", "--model", ENCODER, *QUESTIONS, "--output", "out", *STEP),
             _MODEL | {"squad.json": "tables/squad.json"}, ("squad.json",), kept=2, words=options("finetune", "squad"),
             weight=2),
        Base("race", ("finetune", "race", "--model", ENCODER, "--data", "race", "--output", "out", *STEP),
             _MODEL | {"race": "tables/race"}, ("race/*/*/*",), weight=2),
        Base("settings", ("finetune", "table", "settings.toml", "--model", ENCODER, *TABLE, "--output", "out",
                          "training.device=cpu", "training.steps=1"),
             _files("table") | {"settings.toml": "tables/settings.toml"}, ("settings.toml",), weight=2),
        Base("encoder", ("finetune", "table", "--model", ENCODER, *TABLE, "--output", "out", *STEP), _files("table"),
             (f"{ENCODER}/*",)),
        Base("resume", ("finetune", "table", "--resume", "--output", "tuned"), begun | _MODEL, _RUN_FILES, kept=3,
             words=options("finetune", "table"), weight=3),
        Base("resume questions", ("finetune", "squad", "--resume", "--output", "tuned"),
             {"tuned": "answers-begun"} | _MODEL, _RUN_FILES, weight=3),
        Base("resume complete", ("finetune", "table", "--resume", "--output", "tuned"), {"tuned": "tuned"} | _MODEL,
             ("*/*.json*", "*/*.npy", "*/data/*"), weight=2),
        Base("predict", ("finetune", "predict", "tuned", "dev.tsv", "--device", "cpu"),
             {"tuned": "tuned", "dev.tsv": "dev.tsv"}, ("dev.tsv", "tuned/*", "tuned/tokens/*"), kept=2,
             words=options("finetune", "predict"), weight=2),
        Base("predict questions", ("finetune", "predict", "tuned", "squad.json", "--device", "cpu"),
             {"tuned": "answers", "squad.json": "squad.json"}, ("squad.json", "tuned/*", "tuned/tokens/*")),
    )  # fmt: skip


def _files(task: str, suffix: str = ".tsv") -> dict[str, str]:
    """The encoder, and the files of a task."""
    return _MODEL | {f"{part}{suffix}": f"tables/{task}-{part}{suffix}" for part in ("train", "dev")}


def _task(name: str) -> Base:
    files = ("--train", "train.tsv", "--dev", "dev.tsv")
    return Base(
        name, ("finetune", name, "--model", ENCODER, *files, "--output", "out", *STEP), _files(name), ("*.tsv",)
    )


def chats(options: Options) -> tuple[Base, ...]:
    """Fine-tunings on conversations, and adapters."""
    line = ("finetune", "chat", "chats.jsonl", "--model", "hf", "--output", "out", *CHAT)
    files = {"chats.jsonl": "chats.jsonl", "hf": "hf"}
    words = options("finetune", "chat")
    templates = ("hf/chat_template.jinja", "hf/tokenizer_config.json")
    adapted = {"adapter": "adapter", "hf": "hf"}
    prompt = ("--prompt", "a", "--tokens", "2", "--seed", "1")
    return (
        Base("conversations", line, files, ("chats.jsonl",), kept=2, words=words, weight=4),
        Base("conversations with adapters", (*line, "--lora-rank", "2"), files, ("chats.jsonl",)),
        Base("template", line, files, templates, weight=2),
        Base("resume", ("finetune", "chat", "--resume", "--output", "chat", "training.steps=2"),
             {"chat": "chat", "hf": "hf"}, ("*/*.json*", "*/config.toml", "*/chat/*", "*/initial/*", "*/tokens/*"),
             weight=4),
        Base("generate by a run", ("generate", "chat", *prompt), {"chat": "chat"},
             ("*/*.json*", "*/config.toml", "*/initial/*", "*/tokens/*")),
        Base("adapter", ("generate", "hf", "--adapter", "adapter", *prompt), adapted, ("adapter/*",), weight=4),
        Base("scores with an adapter", ("evaluate", "hf", "--adapter", "adapter", "--text", "text.txt", "--window",
                                        "16", "--overlap", "16"),
             adapted | {"text.txt": "prompts.jsonl"}, ("adapter/*",)),
        Base("export with an adapter", ("checkpoint", "export", "chat", "merged"), {"chat": "chat"},
             ("*/config.toml", "*/initial/*", "*/checkpoints/*/*")),
    )  # fmt: skip


def encoders(options: Options, keys: tuple[str, ...]) -> tuple[Base, ...]:
    """Masked text: vocabularies, indexes of sentences, and the commands on an encoder. `keys` are the names of a run's
    settings.
    """
    masked = {"masked.toml": "masked.toml", "vocab.txt": "vocab.txt", "speech.txt": "speech.txt"}
    tokens = {"masked.toml": "masked.toml", "tokens": "masked-tokens"}
    trained = ("train", "masked.toml", "data.tokens=tokens", "data.text=[]", "data.tokenizer=", "data.num_shards=1")
    texts = {"lines.txt": "lines.txt"}
    fill = ("generate", ENCODER, "--prompts", "masks.jsonl")
    score = ("evaluate", ENCODER, "--text", "lines.txt", "--window", "16")
    extra = (f"{ENCODER}/*.json", f"{ENCODER}/*/*.json")
    return (
        Base("vocabulary", ("prepare", "masked.toml"), masked, ("vocab.txt",), weight=3),
        Base("prepare masked", ("prepare", "masked.toml"), masked, ("masked.toml", "speech.txt"), kept=2,
             words=(*keys, "--explain", "--json"), weight=2),
        Base("settings", ("train", "masked.toml", "data.text=missing.txt"), masked, ("masked.toml",), kept=3,
             words=keys, ends_with=(2,), weight=2),
        Base("sentences", trained, tokens, ("tokens/*.sentences", "tokens/manifest.json"), weight=3),
        Base("sentences verified", ("prepare", "masked.toml", *trained[2:]), tokens, ("tokens/*",)),
        Base("fill", fill, _MODEL | {"masks.jsonl": "masks.jsonl"}, ("masks.jsonl",), kept=2,
             words=options("generate"), weight=3),
        Base("fill by any", fill, _MODEL | {"masks.jsonl": "masks.jsonl"}, extra, weight=2),
        Base("embed", ("embed", ENCODER, "lines.txt"), _MODEL | texts, ("lines.txt",), kept=2, words=options("embed"),
             weight=2),
        Base("embed by any", ("embed", ENCODER, "lines.txt"), _MODEL | texts, extra, weight=3),
        Base("evaluate", score, _MODEL | texts, ("lines.txt",), kept=2,
             words=options("evaluate", without=("--harness", "--harness-folder")), weight=2),
        Base("evaluate by any", score, _MODEL | texts, (f"{ENCODER}/*",)),
    )  # fmt: skip
