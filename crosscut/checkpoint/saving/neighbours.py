"""Copy a checkpoint's files to the memory of the next machine while the checkpoint is being written to memory.

Each machine has its own draft, the folder in which the checkpoint is written. When a rank has written its file, it
sends the file to a rank on the next machine. When all ranks have sent their files, the first rank of each machine adds
the index and the manifest, and publishes the draft. Only then is the previous checkpoint removed, so a complete
checkpoint exists at any time.
"""

from contextlib import suppress
from typing import Any

from crosscut.checkpoint.folders import is_checkpoint_file, remove_checkpoint
from crosscut.checkpoint.format.index import INDEX_FILE
from crosscut.checkpoint.in_memory import Hosts
from crosscut.checkpoint.storage import LocalFolder
from crosscut.config import CheckpointError
from crosscut.config.conventions import MANIFEST_FILE
from crosscut.parallel.collectives import own_rank
from crosscut.parallel.state.files import Transfer, share_sizes, transfer_files


class NeighbourCopies:
    """Exchange of checkpoint files between the memories of machines. Every rank creates an instance and calls the same
    methods. `group` is a process group of all ranks (`parallel.collectives.background_group`).
    """

    def __init__(self, hosts: Hosts, group: Any) -> None:
        self.hosts, self.group = hosts, group

    def begin(self, draft: LocalFolder) -> None:
        """Create the draft if it does not exist. The coordinator has already created the draft on its own machine."""
        draft.make()

    def spread(self, draft: LocalFolder, name: str, *, is_written: bool) -> None:
        """Send this rank's file `name` in `draft` to the next machine, and receive the files that the previous machine
        sends to this rank. A rank whose file could not be written must also call this method, with `is_written` false.
        The names of the ranks' files differ only in the rank number.
        """
        rank = own_rank()
        names = [name.replace(f"-{rank}.", f"-{other}.") for other in range(len(self.hosts.of_ranks))]
        sizes = share_sizes(_size(draft, name) if is_written else -1, self.group)
        transfer_files(self.hosts.copies(sizes, names), draft.path, self.group)

    def publish(self, folder: LocalFolder, draft: LocalFolder) -> None:
        """Complete the draft on every machine, publish all drafts, and remove older checkpoints.

        Raises `CheckpointError` on all ranks if a machine cannot publish its draft.
        """
        rank, is_well = own_rank(), 1
        sizes = {name: share_sizes(_size(draft, name), self.group)[0] for name in (INDEX_FILE, MANIFEST_FILE)}
        leaders = [self.hosts.ranks(host)[0] for host in range(self.hosts.number)]
        try:
            transfers = [Transfer(name, size, 0, other) for name, size in sizes.items() for other in leaders[1:]]
            transfer_files(transfers, draft.path, self.group)
            if rank in leaders:
                folder.publish(draft, MANIFEST_FILE, is_checkpoint_file)
        except (OSError, CheckpointError):
            is_well = 0
        if not all(share_sizes(is_well, self.group)):
            raise CheckpointError(f"`{folder}` was not written, because a machine denies access or has no free space.")
        root = LocalFolder(folder.path.parent)
        for name in root.folders() if rank in leaders else ():
            if name != folder.name:
                with suppress(OSError):
                    remove_checkpoint(root / name)


def _size(folder: LocalFolder, name: str) -> int:
    """Return the size of a file in bytes, or 0 if the file does not exist."""
    return folder.files().get(name, 0)
