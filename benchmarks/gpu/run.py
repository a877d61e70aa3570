"""Crosscut on one GPU, by the plan for fifteen minutes of a lent one: two calls of at most 5.5 minutes each.

    mkdir base && git archive REVISION crosscut | tar x -C base       # the code to compare with
    python benchmarks/gpu/run.py --call 1 --base base --json 1.json   # profiles, products, attention
    python benchmarks/gpu/run.py --call 2 --base base --json 2.json   # ratios to the base and to a plain program
    python benchmarks/gpu/run.py --forecast                           # the planner's forecasts; no GPU, no torch
    python benchmarks/gpu/run.py --device cpu --tiny --base base      # all of it on tiny models, in two minutes

The entries (`plan.py`) run one after another, each in a process of its own, so that none shares memory with another;
all share one cache of compiled code. Base and changed code alternate. `--base` may name more folders, such as one for
each remedy: the second call measures them, too.

| event | consequence |
|---|---|
| an entry would not end in time | it is skipped, and the output names it |
| an entry fails, or takes longer than its limit | the output gives the reason, and the others go on |
| compiled and uncompiled gradients of Crosscut differ | the entry fails: code without a gradient is fast |

The JSON file is written again after every entry, so an interrupted call keeps its results.

Model FLOP/s follow the planner's formula: matrix products of forward and backward pass, attention over the whole
square, no recomputation. Utilisation is relative to the dense bfloat16 peak that the manufacturer states. There is no
dropout; weights, accumulated gradients and AdamW are in float32. A rank of eight runs alone with collectives that do
nothing: its compute and memory are real, its messages are missing. Weights are drawn on the device.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # nothing is imported in the processes of entries, which import this file, too
    sys.path.insert(0, str(Path(__file__).parents[2]))

    from benchmarks.gpu.calls import main

    sys.exit(main(__doc__))
