"""Lets `python -m crosscut` (and so `torchrun -m crosscut`) run the command line."""

from crosscut.cli import main

if __name__ == "__main__":
    main()
