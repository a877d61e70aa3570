"""Commands that measure every published figure; `benchmarks/README.md` lists them.

A command is run by its path, as `python benchmarks/training/train_step.py`. Python then knows only the folder of that
file, so each command adds the checkout to `sys.path` before it imports `benchmarks` or `crosscut`.
"""
