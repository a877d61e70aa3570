"""Entry point of `crosscut`, `python -m crosscut` and `torchrun -m crosscut`: run the command line."""

import signal


def main() -> None:
    """Run `crosscut.cli.main`. Ctrl-C while its modules are imported ends the program without a traceback."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from crosscut.cli import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
