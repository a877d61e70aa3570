"""Write the documentation pages that are generated: the settings of runs and corpora, the scaling studies, the figures
of one GPU, the map of the paper, and its living figures.

The text under a field of a config dataclass is the field's help. This program copies these texts into the pages. Run
`python docs/generate.py` after changing a field or a preset. With `--check`, nothing is written, and the exit status is
1 if a page differs from the page that would be generated.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import json
import os
import sys
import typing
from pathlib import Path

from crosscut.cli.arguments import run_from
from crosscut.config import PRESETS, CorpusConfig, DataConfig, Layout, ModelConfig, RunConfig, load_run
from crosscut.config.axes import AXES
from crosscut.config.corpora import SourceConfig
from crosscut.config.data import MixedFolder
from crosscut.config.model import mixer_sections
from crosscut.config.parts.section import MixerSection
from crosscut.config.published.families import FAMILIES
from crosscut.config.published.keys import (
    ADAPTER,
    GENERATION,
    ROTARY,
    SENTENCES,
    SPECIAL_TOKENS,
    TOKENIZER,
    Keys,
    keys_of_model,
)
from crosscut.config.published.presets import sequence_length_of
from crosscut.config.recipes import RECIPES
from crosscut.config.system.records import from_json
from crosscut.config.system.wording import markdown_table
from crosscut.logbook.schema import BY_NAME, METRICS_FILE, RUN_FILES, VERSION, Kind
from crosscut.planner import count_parameters
from crosscut.planner.paper.sections import Picture, to_markdown
from crosscut.planner.paper.study import scaling_report
from crosscut.planner.showing import picture, shown
from crosscut.scaling.measured_report import measured_report
from crosscut.scaling.quality.figure import ALT
from crosscut.scaling.quality.report import quality_report, rate_section
from crosscut.scaling.quality.results import QualityResults, RateResults
from crosscut.scaling.results import Results

DOCS = Path(__file__).parent
_T = typing.TypeVar("_T")
sys.path.insert(0, str(DOCS))

from alive import alive_page  # noqa: E402 - the programs here are no package
from paper import paper_page  # noqa: E402

INTRODUCTION = """\
<!-- Written by `python docs/generate.py` from the dataclasses in `crosscut/config/`. Change the text there. -->

# Configuration

This page lists every setting of a run. A run is one TOML file with the sections below. A key that the file leaves out
has the value of the run's [recipe](#recipes). The tables of the sections give the defaults of the paper's recipe.
Unknown keys and impossible values are errors before any process starts. All of them are reported together, each with
its line in the file and, for an unknown key, with the key that was probably meant. Any key can be set on the command
line by its dotted name, as in `crosscut train run.toml training.steps=1000 layout.tensor=2`. The resolved run is saved
in the run's folder and is enough to repeat it. A complete file:

```toml
[model]
preset = "gpt2-small"

[layout]
tensor = 2
sequence_parallel = true

[data]
text = ["corpus/*.jsonl.gz"]
tokenizer = "tokenizer.json"

[training]
steps = 10000
batch_size = 64
```
"""

CORPUS_INTRODUCTION = """\
<!-- Written by `python docs/generate.py` from the dataclasses in `crosscut/config/corpora/`. Change it there. -->

# Configuration of a corpus

This page lists every setting of a corpus. A corpus is one TOML file, for `crosscut prepare corpus.toml`
([corpus.md](corpus.md)). It has `folder`, one `[[sources]]` for each kind of text, and the sections below. A key that
the file leaves out has its default. The default is the paper's value if the paper gives one, except in `[cleaning]`,
`language.detector` and `leakage.action`. Keys outside `[[sources]]` can be set on the command line, as in `crosscut
prepare corpus.toml seed=7`. Relative paths start at the folder in which the command runs. The resolved file is saved in
the corpus's folder. A complete file:

```toml
folder = "corpora/books"

[[sources]]
name = "books"
files = ["books/*.jsonl.zst"]

[[sources]]
name = "mail"
files = ["mail"]
format = "mail"
weight = 0.5

[leakage]
test_sets = ["lambada_test.jsonl", "wiki.test.raw"]

[tokens]
tokenizer = "tokenizer.json"
```
"""

MODEL_NOTE = """\
`model.preset` names one of the [presets](#presets) and sets the required fields; other fields of the section change
it. The preset also sets `training.sequence_length`, unless the run gives this key. On the command line `model.preset`
replaces the preset of the file. If the file's section has no preset, `model.preset` replaces the whole section. The
demo's section has none.
"""

AXES_NOTE = """\
### Axes

These are the axes along which a layout arranges ranks, outermost first, from `crosscut/config/axes.py`. The role of an
axis says which ranks see different tokens, whose losses and gradients are summed, and which ranks hold copies, whose
bits must stay the same. `replica` and `shard` together are `data`: `shard_group` says how many ranks are in `shard`.
Experts are arranged over the same ranks a second time: `expert_replica`, `expert_shard` and `expert` take the place of
`replica`, `shard` and `context`.
"""

PRESETS_NOTE = """\
The column "sequence" has the default of `training.sequence_length`: the length on which the published model was trained
for most of its tokens. The last column has the parameters of the whole model with tied embeddings, as counted by
`crosscut.planner.count_parameters`. A preset with the tokenizer's vocabulary is counted with {vocab_size:,} entries,
the default of `data.vocab_size`.

`demo` is the demo's model, with the settings of the recipe `modern`, which is the preset's recipe.
"""


RECIPES_NOTE = """\
A recipe is a set of defaults with a name: `recipe = "paper"` in the first lines of a file, or `recipe=paper` on the
command line. A setting of the run always replaces the recipe's. A run without a recipe has

- `continued`, if it trains published weights further (`training.initialize_from`);
- `modern`, if its model is the demo's: `model.preset` is `demo`, or the command line has neither a file nor a preset;
- `small`, if its model has fewer than 100 million parameters in its matrices;
- `llama` or, from 30 billion parameters on, `llama-large`, if its norms are RMS norms, as in Llama, Qwen and DeepSeek:
  the optimizer of Llama 2 ([arXiv 2307.09288](https://arxiv.org/abs/2307.09288), section 2.2), with the paper's batch;
- `paper` otherwise.

The banner of a run, the output of `plan` and the file of a run name the recipe and the learning rate.

Some defaults depend on other settings. The warm-up takes at most a twentieth of the steps. The validation set is
scored at least ten times; in a run of fewer than 100 steps, every 10 steps, or about four times if that is more often.
The sequences are no longer than the model's positions, and for a preset, they have the length on which the preset was
trained. The batch is raised to the next multiple of `layout.data`. If the run gives a learning rate, its minimum is at
most a tenth of this rate, and the rates by role stay those of the recipe. The recipe's `matrix_learning_rate` is
Muon's, so it is left out if the run sets `optimizer.matrices = "adamw"`.

Published weights (`training.initialize_from`) may be trained with every recipe. The model and the initial weights are
then the published ones: the recipe sets no key of `[model]`, and neither `training.initial_spread` nor
`training.zero_initial_outputs`.
"""

KEYS_INTRODUCTION = """\
<!-- Written by `python docs/generate.py` from the tables in `crosscut/config/published/keys/`. Change them there. -->

# Keys of published files

This page lists the keys of the files beside the weights of [published models](../pretrained.md), encoders, tokenizers
and [adapters](../lora.md), and says what Crosscut does with each:

- *used*: Crosscut reads the key.
- *only*: Crosscut refuses the key, by its name, unless it has one of these values, with which it changes nothing.
- *no effect*: the value changes nothing that Crosscut computes.

A key that is in no table is named in one line and stops nothing. Tests hold the tables against the classes that write
these files in `transformers`, PEFT and sentence-transformers ([decision 62](../decisions/0062-keys.md)).
"""

RUN_FILES_INTRODUCTION = """\
<!-- Written by `python docs/generate.py` from the tables in `crosscut/logbook/schema.py`. Change them there. -->

# Files of a run

This page lists the files in a run's folder, and the keys of those that hold rows or an object (version {version}). A
file without a version has version 1. Files of a newer version are refused. A resume or a rollback writes a file of rows
anew, without the rows of undone steps. A dot leads to the keys of an inner object or of the objects in a list, and `*`
stands for any name.
"""

GPU_INTRODUCTION = """\
<!-- Written by `python docs/generate.py` from `gpu-measured.json`, which `benchmarks/gpu/run.py` wrote. -->

# One GPU, measured

This page lists all steps that `python benchmarks/gpu/run.py` measured, with the planner's forecasts of Crosscut's
steps. The forecasts use no figure of this card. They leave out communication, because only one rank ran. *Ratio* is
forecast / measured, and *share* that of the dense peak. [benchmarks/README.md](../benchmarks/README.md#one-gpu)
describes the models and names the goals.
"""

RECIPE_WIDE = ("model.max_sequence_length=1024",)
"""Override with which every recipe has its own sequence length in the table of recipes."""


def field_docs(kind: type) -> dict[str, str]:
    """The text under each field of a dataclass, as a cell of a table; a field without one is missing."""
    tree = ast.parse(inspect.getsource(kind))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs = {}
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split()).replace("|", "\\|")
    return docs


def sections(whole: type = RunConfig) -> dict[str, type]:
    """The sections of a run, or of a corpus, and their dataclasses, in the order of the file."""
    hints = typing.get_type_hints(whole)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(whole)}
    return {name: kind for name, kind in kinds.items() if dataclasses.is_dataclass(kind)}


def configuration_page() -> str:
    """The whole of `docs/configuration.md`."""
    parts = [INTRODUCTION]
    for name, kind in sections().items():
        parts.append(_section(f"[{name}]", kind))
        if kind is DataConfig:
            parts.append(_section("[[data.mixture]]", MixedFolder))
        if kind is ModelConfig:
            parts.extend(_section(f"[model.{name}]", section) for name, section in mixer_sections().items())
    return "\n".join([*parts, _recipes(), _presets()])


def corpus_page() -> str:
    """The whole of `docs/corpus-configuration.md`."""
    elsewhere = {"sources", *sections(CorpusConfig)}
    alone = [field for field in dataclasses.fields(CorpusConfig) if field.name not in elsewhere]
    parts = [
        CORPUS_INTRODUCTION,
        f"## The corpus\n\n{_table(CorpusConfig, alone)}",
        _section("[[sources]]", SourceConfig),
        *(_section(f"[{name}]", kind) for name, kind in sections(CorpusConfig).items()),
    ]
    return "\n".join(parts)


def scaling_page() -> str:
    """The whole of `docs/scaling.md`."""
    return to_markdown(scaling_report())


def measured_scaling_page() -> str:
    """The whole of `docs/scaling-measured.md`, from what `crosscut study measure` wrote beside it."""
    results = (DOCS / "scaling-measured.json").read_text(encoding="utf-8")
    return to_markdown(measured_report(Results.from_json(results)))


def quality_page() -> str:
    """The whole of `docs/quality.md`, from what `crosscut study quality` and `crosscut study rate` wrote beside it."""
    results, short = _read(QualityResults, "quality-measured.json"), _read(RateResults, "rates-measured.json")
    report = quality_report(results, Picture("quality.png", ALT, b""))
    sections = [*report.sections, rate_section(short, "Learning rates: short runs", RATES_NOTE)]
    if (DOCS / "rates-whole-measured.json").is_file():
        whole = _read(RateResults, "rates-whole-measured.json")
        note = WHOLE_RATES_NOTE.format(steps=_grid_steps(short, whole))
        sections.append(rate_section(whole, "Learning rates: whole runs", note))
    words = f"{report.words} {QUALITY_NOTE}"
    return to_markdown(report._replace(mark=QUALITY_MARK, words=words, sections=sections))


def _read(kind: type[_T], name: str) -> _T:
    """Figures of a study, from the file that it wrote."""
    return from_json(kind, json.loads((DOCS / name).read_text(encoding="utf-8")))


def _grid_steps(short: RateResults, whole: RateResults) -> str:
    """Steps of the grid between the best rates of short and of whole runs, for each size of the whole runs."""
    rates = [trial.rate for trial in short.sizes[0].trials]
    best = {size.name: size.best for size in short.sizes}
    steps = {size.name: abs(rates.index(size.best) - rates.index(best[size.name])) for size in whole.sizes}
    return ", ".join(f"{number} for `{name}`" for name, number in steps.items())


def measured_gpu_page() -> str:
    """The whole of `docs/gpu-measured.md`, from what `benchmarks/gpu/run.py` wrote beside it."""
    runs = json.loads((DOCS / "gpu-measured.json").read_text(encoding="utf-8"))["runs"]
    return "\n".join([GPU_INTRODUCTION, *(_gpu_table(run["machine"], run["measurements"]) for run in runs)])


def keys_page() -> str:
    """The whole of `docs/tables/keys.md`."""
    models = [(name, keys_of_model(name)) for name in FAMILIES]
    others = [("", table) for table in (ROTARY, GENERATION, TOKENIZER, SPECIAL_TOKENS, *SENTENCES.values(), ADAPTER)]
    parts = [KEYS_INTRODUCTION, "## `config.json`", "", *_keys_table(models), ""]
    for one in others:
        parts += [f"## {one[1].title}", "", *_keys_table([one]), ""]
    return "\n".join(parts)


def run_files_page() -> str:
    """The whole of `docs/tables/run-files.md`."""
    files = [(f"`{file.name}`", file.form.value, file.meaning) for file in RUN_FILES]
    parts = [RUN_FILES_INTRODUCTION.format(version=VERSION), *markdown_table(("name", "form", "content"), files), ""]
    for file in RUN_FILES:
        for kind in file.kinds:
            if kind.name == "first row" and file is not BY_NAME[METRICS_FILE]:
                continue
            parts += [f"## `{file.name}`: {kind.name}", "", *_run_keys(kind), ""]
    return "\n".join(parts)


def _run_keys(kind: Kind) -> list[str]:
    rows = [(f"`{key.name}`", key.unit, f"{key.meaning}{'; optional' if key.is_optional else ''}") for key in kind.keys]
    return markdown_table(("key", "unit", "meaning"), rows)


def cut_picture() -> str:
    """The whole of `docs/cut.svg`: the demo's MLP on its two tensor ranks."""
    run = run_from(("layout.tensor=2",)).with_vocabulary()
    return picture(shown(run, device="cpu", layer=0).region("mlp"), "An MLP on two tensor ranks")


QUALITY_MARK = "Written by `python docs/generate.py` from the files of `crosscut study` beside it."
QUALITY_NOTE = "The commands are in [evaluation.md](evaluation.md#quality-by-size)."
RATES_NOTE = (
    "One run for each rate, with a fifth of the steps. Its warm-up and its decay are as much shorter. The best rates "
    "are those of the study. The paper found that a rate tuned for each model improves it, but used one rate for all "
    "sizes (section 4.1.1)."
)
WHOLE_RATES_NOTE = (
    "Complete runs, with one seed: `crosscut study rate --share 1`. Steps of the grid between the best rates of short "
    "and of complete runs: {steps}."
)


PAGES = {
    "cut.svg": cut_picture,
    "configuration.md": configuration_page,
    "corpus-configuration.md": corpus_page,
    "scaling.md": scaling_page,
    "scaling-measured.md": measured_scaling_page,
    "quality.md": quality_page,
    "gpu-measured.md": measured_gpu_page,
    "tables/keys.md": keys_page,
    "paper.md": paper_page,
    "alive.html": alive_page,
    "tables/run-files.md": run_files_page,
}


def _section(heading: str, kind: type) -> str:
    note = f"{MODEL_NOTE}\n" if kind is ModelConfig else ""
    more = f"\n{AXES_NOTE}\n{axes_table()}" if kind is Layout else ""
    return f"## `{heading}`\n\n{inspect.getdoc(kind)}\n\n{note}{_table(kind, dataclasses.fields(kind))}{more}"


def _keys_table(tables: list[tuple[str, Keys]]) -> list[str]:
    """A row for each key, and for each meaning that it has in some of the tables. `tables` are named tables."""
    meanings: dict[tuple[str, str], list[str]] = {}
    for name, table in tables:
        for key, meaning in sorted(_meanings(table).items()):
            meanings.setdefault((key, meaning), []).append(name)
    keys = sorted(meanings, key=lambda one: one[0].casefold())
    if len(tables) == 1:
        return markdown_table(("key", "meaning"), [(f"`{key}`", meaning) for key, meaning in keys])
    rows = []
    for key, meaning in keys:
        names = meanings[key, meaning]
        told = "all" if len(names) == len(tables) else ", ".join(f"`{name}`" for name in names)
        rows.append((f"`{key}`", told, meaning))
    return markdown_table(("key", "families", "meaning"), rows)


def _meanings(table: Keys) -> dict[str, str]:
    only = {key: ", ".join(f"`{json.dumps(one)}`" for one in allowed) for key, allowed in table.only.items()}
    return {
        **{key: f"used: {use}" for key, use in table.used.items()},
        **{key: f"only: {values}" for key, values in only.items()},
        **{key: f"no effect: {reason}" for key, reason in table.without_effect.items()},
    }


def axes_table() -> str:
    """The table of axes, a row for each, outermost first."""
    rows = []
    for row in AXES:
        slices = "; each rank stores a slice of every parameter" if row.stores_slices else ""
        role = f"{row.role}{slices}{'; consists of ranks of other axes' if row.is_folded else ''}"
        key = "the ranks that are left" if row.is_derived else f"`layout.{row.option}`"
        rows.append((f"`{row.name}`", row.shares, role, key))
    return "\n".join([*markdown_table(("axis", "its ranks share", "role", "key"), rows), ""])


def _table(kind: type, fields: typing.Sequence[dataclasses.Field[object]]) -> str:
    docs = field_docs(kind)
    rows = [(f"`{field.name}`", _default(field), docs[field.name]) for field in fields]
    return "\n".join([*markdown_table(("key", "default", "meaning"), rows), ""])


def _default(field: dataclasses.Field[object]) -> str:
    """A field's default as TOML writes it."""
    match field.default:
        case dataclasses.MISSING:
            return "required"
        case bool(value):
            return f"`{str(value).lower()}`"
        case str(value):
            return f'`"{value}"`'
        case tuple(values):
            return f"`{list(values)}`"
        case MixerSection():
            return "a section"
        case value:
            return f"`{value}`"


def _presets() -> str:
    rows = []
    for name, fields in PRESETS.items():
        model = ModelConfig(**fields)
        counted = model if model.vocab_size else dataclasses.replace(model, vocab_size=DataConfig().vocab_size)
        vocabulary = f"{model.vocab_size:,}" if model.vocab_size else "tokenizer's"
        sizes = (model.num_layers, model.hidden_size, model.num_heads)
        cells = (*sizes, vocabulary, model.max_sequence_length, sequence_length_of(name))
        rows.append((f"`{name}`", *map(str, cells), f"{count_parameters(counted):,}"))
    head = ("preset", "layers", "hidden", "heads", "vocabulary", "positions", "sequence", "parameters")
    note = PRESETS_NOTE.format(vocab_size=DataConfig().vocab_size)
    return "\n".join(["## Presets", "", note, *markdown_table(head, rows), ""])


def _recipes() -> str:
    """The table of recipes: the settings that differ between them."""
    runs = {name: load_run({"model": PRESETS["laptop-small"], "recipe": name}, RECIPE_WIDE) for name in RECIPES}
    keys = dict.fromkeys(
        f"{section}.{key}" for recipe in RECIPES.values() for section, values in recipe.items() for key in values
    )
    rows = []
    for key in keys:
        section, _, name = key.partition(".")
        rows.append([f"`{key}`", *(f"`{getattr(getattr(run, section), name)}`" for run in runs.values())])
    table = markdown_table(["setting", *(f"`{name}`" for name in RECIPES)], rows)
    return "\n".join(["## Recipes", "", RECIPES_NOTE, *table, ""])


def _gpu_table(machine: dict[str, str], measurements: list[dict[str, typing.Any]]) -> str:
    """One session on a GPU: a row for each step that was measured."""
    versions = ", ".join(f"{name} {machine[name]}" for name in ("driver", "torch", "triton", "transformers"))
    rows = [_gpu_row(each["name"], each["figures"], each["forecast"]) for each in measurements if each["figures"]]
    head = ("step", "s", "tokens/s", "share", "peak GiB", "forecast s", "ratio", "forecast GiB", "ratio")
    table = markdown_table(head, rows)
    return "\n".join([f"## {machine['device']}, {machine['date'][:10]}", "", f"{versions}.", "", *table, ""])


def _gpu_row(name: str, figures: dict[str, float], forecast: dict[str, float]) -> list[str]:
    seconds, peak = figures["seconds_per_step"], figures["peak_bytes"]
    cells = [name, f"{seconds:.3f}", f"{figures['tokens_per_second']:,.0f}", f"{figures['of_dense_peak']:.1%}"]
    cells.append(f"{peak / 2**30:.1f}")
    for known, measured, scale in (("seconds_per_step", seconds, 1), ("peak_bytes", peak, 2**30)):
        planned = forecast.get(known)
        digits = 3 if scale == 1 else 1
        cells += [f"{planned / scale:.{digits}f}", f"{planned / measured:.2f}"] if planned else ["", ""]
    return cells


def main(arguments: list[str] | None = None, folder: Path = DOCS) -> int:
    """Write the pages, or with `--check` compare them; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the pages of docs/ that follow from the config dataclasses.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is stale")
    check = parser.parse_args(arguments).check
    stale = 0
    for name, make in PAGES.items():
        page, text = folder / name, make()
        if page.is_file() and page.read_text(encoding="utf-8") == text:
            continue
        if check:
            stale = 1
            print(f"{name} is stale: run `python docs/generate.py`.", file=sys.stderr)
            continue
        page.parent.mkdir(exist_ok=True)
        temporary = page.with_name(f".{page.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(page)
        print(f"{name} is written.")
    return stale


if __name__ == "__main__":
    sys.exit(main())
