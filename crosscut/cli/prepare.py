"""`crosscut prepare`."""

import json
from pathlib import Path

import click

from crosscut.cli.arguments import RunCommand, has_file, on_devices_there, run_arguments, run_from
from crosscut.cli.runs.named import RUN
from crosscut.config import ConfigError, CorpusConfig, is_corpus, load_corpus
from crosscut.config.system.terminal import echo, new_console


class _PrepareCommand(RunCommand):
    """Command whose first argument may be the word `teacher`, which stands for the option `--teacher`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        return super().parse_args(ctx, ["--teacher", *args[1:]] if args[:1] == ["teacher"] else args)


@click.command(cls=_PrepareCommand)
@run_arguments(f"[teacher] [CORPUS.toml|{RUN}]")
@click.option("--teacher", "for_teacher", is_flag=True, hidden=True, help="The same as the word `teacher`.")
@click.option(
    "--explain",
    metavar="ID",
    help="Print what each stage did with one document, such as web/web.jsonl#3, and which texts matched this document.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the corpus report as JSON.")
def prepare(arguments: tuple[str, ...], for_teacher: bool, explain: str | None, as_json: bool) -> None:
    """Make token shards from raw text, or store the logits of a run's teacher.

    With CORPUS.toml (a file with [[sources]]), the command reads the text, cleans it, removes duplicates and passages
    of test sets, and tokenizes the rest. A report shows how many documents each stage dropped, and why. If you start
    the command again, it continues where it stopped, and repeats only the stages that a changed setting affects.

    With RUN.toml, the command only tokenizes the run's text. `crosscut train` also does this if the tokens do not
    exist. On a cluster, prepare the tokens first.

    With the word `teacher` before RUN.toml, the command also computes the teacher of the run once, on as many ranks as
    the run has, and stores its likeliest logits in the folder `teacher.cache` (docs/distillation.md). If you start the
    command again, it continues where it stopped.
    """
    if for_teacher:
        from crosscut.training.teachers.preparation import prepare_teacher

        prepare_teacher(on_devices_there(run_from(arguments)))
        return
    if has_file(arguments) and is_corpus(Path(arguments[0])):
        config = load_corpus(Path(arguments[0]), arguments[1:])
        if explain is not None:
            from crosscut.corpus import explain_document

            echo(explain_document(config, explain))
        else:
            _prepare_corpus(config, as_json=as_json)
    elif explain is not None or as_json:
        raise ConfigError(
            "`--explain` and `--json` need a corpus file (a TOML file with [[sources]]), but none is given. Name the "
            "file as the first argument."
        )
    else:
        _prepare_run(arguments)


def _prepare_corpus(config: CorpusConfig, *, as_json: bool) -> None:
    from crosscut.corpus import cleaned_otherwise, prepare_corpus, print_summary

    for line in cleaned_otherwise(config):
        echo(f"crosscut: {line}", err=True)
    report = prepare_corpus(config).report
    if as_json:
        echo(json.dumps(report))
    else:
        print_summary(config, report, new_console())


def _prepare_run(arguments: tuple[str, ...]) -> None:
    run = run_from(arguments)
    from crosscut.data import folders_of
    from crosscut.data import prepare as prepare_tokens

    tokens = prepare_tokens(run.data, Path(run.tokens_folder), seed=run.training.seed)
    for folder in folders_of(tokens):
        num_training = sum(shard.num_tokens for shard in folder.train)
        echo(
            f"{folder.path}: {num_training:,} training and {folder.validation.num_tokens:,} validation tokens, "
            f"vocabulary {folder.vocab_size:,}."
        )
