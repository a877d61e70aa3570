"""Entry point of `python -m crosscut` and `torchrun -m crosscut`: run the command line."""

from crosscut.cli import main

if __name__ == "__main__":
    main()
