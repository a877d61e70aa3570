"""Entry point of `crosscut`, `python -m crosscut` and `torchrun -m crosscut`: run the command line."""

import signal


def main() -> None:
    """Run `crosscut.cli.main`. Ctrl-C while its modules are imported ends the program without a traceback."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in the background of a script
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from crosscut.cli import main as run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
