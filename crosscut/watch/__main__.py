"""Page of a run that another process trains. It ends with that process, which holds the other end of its input."""

import sys
import threading

from crosscut.config import ConfigError
from crosscut.config.system.terminal import echo
from crosscut.watch.found import Runs
from crosscut.watch.server import PORT, WatchServer, addresses

if __name__ == "__main__":
    runs = Runs(sys.argv[1:])
    try:
        server = WatchServer(runs, PORT)
    except ConfigError:  # another page has the usual port
        server = WatchServer(runs, 0)
    echo("\n".join(addresses(server.server_port)))  # `beside` reads the lines
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
