"""Crosscut in the deduplication benchmark: run the stages of duplicates on the cleaned parts in FOLDER/work.

    python benchmarks/corpus/deduplicating/run.py FOLDER WORKERS

The first `crosscut` on the path of Python is measured, so another checkout can be measured too. The seconds and counts
of the stages are written to FOLDER/crosscut.json.
"""

import json
import os
import sys
import time
from pathlib import Path

from crosscut.config.corpora import CorpusConfig, EngineConfig, SourceConfig
from crosscut.corpus.documents import CLEANING, INGEST, Lineage
from crosscut.corpus.duplicates.planted import PLANTED
from crosscut.corpus.duplicates.stages import duplicate_stages
from crosscut.corpus.execution.engine import start_engine
from crosscut.corpus.execution.running import run_stage
from crosscut.corpus.execution.stages import Digests, read_records
from crosscut.data.progress import ProgressBar


def find_duplicates(folder: Path, workers: int) -> None:
    """Run the stages. The CPU time is that of this process, which does all of the work if there is one worker."""
    work = folder / "work"
    config = CorpusConfig(
        sources=(SourceConfig(name="texts", files=("-",)),), folder=str(folder), engine=EngineConfig(workers=workers)
    )
    digests = Digests()
    for before in (INGEST, CLEANING):
        for record in read_records(work, before):
            digests.learn(work / before, record)
    seconds = {}
    with start_engine(config.engine, work) as engine, ProgressBar(shown=False) as bar:
        for stage in duplicate_stages(config, Lineage(cleaned=True)):
            if stage.name != PLANTED:
                start, start_cpu = time.perf_counter(), time.process_time()
                result = run_stage(stage, work, engine=engine, digests=digests, bar=bar)
                elapsed, cpu = time.perf_counter() - start, time.process_time() - start_cpu
                seconds[stage.name] = {"elapsed": elapsed, "cpu": cpu, "counts": result.counts}
    (folder / "crosscut.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    find_duplicates(Path(sys.argv[1]), int(sys.argv[2]))
