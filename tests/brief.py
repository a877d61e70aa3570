"""Setting of the package with which every run in a test starts a tenth of a second earlier. The server of `nursery.py`
imports this module, and so do tests that have imported what it changes.
"""

from crosscut.training.watching import throughput

throughput._SECONDS_TO_MEASURE = 0.005
