"""Command of the tokenization benchmark; `benchmarks/tokenization.py` does the work.

python benchmarks/tokenize.py [--text NAME ...] [--tokenizer FILE] [--megabytes N] [--turns N] [--memory] [--json FILE]
python benchmarks/tokenize.py --engines [--text NAME ...] [--tokenizer FILE] [--json FILE]

Python puts a script's folder first in its path, so while any script of this folder runs, `import tokenize` (the
standard library's own `inspect` has one) finds this file. It then puts the standard module in its place.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib may itself import `tokenize`

if __name__ == "tokenize":
    _path = sys.path[:]
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]  # noqa: PTH100
    del sys.modules["tokenize"]
    import tokenize  # noqa: F401

    sys.path[:] = _path
elif __name__ == "__main__":
    sys.path[0] = os.path.dirname(_HERE)  # noqa: PTH120
    from benchmarks.tokenization import main

    main()
