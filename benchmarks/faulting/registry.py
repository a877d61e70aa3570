"""All faults of `benchmarks/faults.py`. A new fault is one entry of one of these lists."""

from benchmarks.faulting.damaged import DAMAGED
from benchmarks.faulting.disks import DISKS
from benchmarks.faulting.hanging import HANGING
from benchmarks.faulting.killed import KILLED
from benchmarks.faulting.machine import MACHINE
from benchmarks.faulting.nodes import ELASTIC
from benchmarks.faulting.spiking import SPIKING
from benchmarks.faulting.trial import Fault

FAULTS: list[Fault] = [*HANGING, *KILLED, *DISKS, *MACHINE, *DAMAGED, *SPIKING, *ELASTIC]
