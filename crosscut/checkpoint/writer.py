"""Atomic writing of a checkpoint, as a storage writer of `torch.distributed.checkpoint`.

PyTorch's `FileSystemWriter` decides the contents of each file. This module adds hashes and atomic publication. Every
stream is hashed while it is written, so no file is read again. Each rank sends its hashes to the coordinator together
with its results. When all ranks have written their files, the coordinator adds `.metadata` and the manifest, and
publishes the folder. If `dcp.save` returns on one rank, the checkpoint is therefore complete. If `dcp.save` raises on
one rank, it raises on all ranks.

The module relies on these internals of PyTorch: `FileSystemWriter` opens files only through `self.fs.create_stream`;
`write_data` returns the list that `finish` receives from each rank; `finish` writes `.metadata` through `self.fs`.
"""

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from crosscut.checkpoint.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    Progress,
    TensorEntry,
    current_versions,
    dump_manifest,
)
from crosscut.checkpoint.storage import Folder, reason, storage_errors_told
from crosscut.config import CheckpointError

_Path = str | os.PathLike[str]


class StagedSavePlanner(DefaultSavePlanner):
    """Save planner that takes the shapes from the live tensors and the data from copies. `staged` maps each tensor's
    flat name to the copy of this rank's part.
    """

    def __init__(self, staged: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.staged = staged

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Data to write. A tensor is replaced by its copy in `staged`. All other values were already copied by
        `state_of`.
        """
        if write_item.type == WriteItemType.BYTE_IO:
            data: Tensor | io.BytesIO = super().resolve_data(write_item)
            return data
        return self.staged[write_item.index.fqn]


class CheckpointWriter(dcp.FileSystemWriter):
    """Writer of one checkpoint. Every rank creates a writer, and the coordinator's writer publishes the checkpoint."""

    def __init__(
        self,
        folder: Folder,
        progress: Progress,
        *,
        placements: Mapping[str, str],
        published: Callable[[], None] = lambda: None,
        failed: BaseException | None = None,
    ) -> None:
        """Create the writer. `placements` describes the placement of each tensor, by flat name. `published` is called
        on the coordinator when the checkpoint is complete.

        `failed` is an error of this rank, such as a failed copy. If an error is given, the save fails on all ranks.
        """
        # `Folder.create` flushes every file, including those that PyTorch does not flush. All data is already in host
        # memory.
        super().__init__("unused", sync_files=False, per_thread_copy_ahead=0)
        self.folder, self.progress, self.placements = folder, progress, dict(placements)
        self.published, self.failed = published, failed
        self.draft = folder.draft()
        self.streams = HashingStreams(self.draft)
        self.fs, self.path = self.streams, str(folder)  # type: ignore[assignment] # only told apart by its methods

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged. Raises `CheckpointError` if this rank has failed before."""
        if self.failed is not None:
            raise CheckpointError(
                f"The state for `{self.folder}` must be copied to host memory, but the copy failed: "
                f"{reason(self.failed)}."
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create an empty folder, on the coordinator. Files that a killed run left of the same checkpoint are
        removed.
        """
        with self._told():
            self.draft.begin(MANIFEST_FILE)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and send its hash together with the results."""
        with self._told():
            results = super().write_data(plan, planner).value()
        future: Future[list[WriteResult]] = Future()
        future.set_result(_Written(results, self.streams.files, self.placements))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` and the manifest, and publish the folder, on the coordinator."""
        with self._told():
            super().finish(metadata, [list(written) for written in results])
            files: dict[str, FileEntry] = dict(self.streams.files)
            placements: dict[str, str] = {}
            for written in results:
                assert isinstance(written, _Written)
                files.update(written.files)
                placements.update(written.placements)
            self._require_present(files)
            manifest = Manifest(
                progress=self.progress,
                files=dict(sorted(files.items())),
                tensors=tensor_entries(metadata, placements),
                values=value_names(metadata),
                versions=current_versions(),
            )
            self.draft.write(MANIFEST_FILE, dump_manifest(manifest))
            self.folder.publish(self.draft, MANIFEST_FILE)
            self.published()

    def _require_present(self, files: Mapping[str, FileEntry]) -> None:
        """Raise `CheckpointError` if files are missing. They are lost if the folder is removed and created again during
        the writing.
        """
        present = self.draft.files()
        for name, entry in files.items():
            if present.get(name) != entry.size:
                raise CheckpointError(
                    f"`{self.draft}/{name}` must have the {entry.size:,} bytes that were written, but has "
                    f"{present.get(name, 0):,}: the folder was changed during the save."
                )

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Convert errors to `CheckpointError`, which can be sent to the other ranks. An object store's own error may
        not be picklable.
        """
        with storage_errors_told(self.folder, "writable"):
            yield


class _Written(list[WriteResult]):
    """Results of one rank, with the hashes of its files. The class is a list because PyTorch transports a list."""

    def __init__(
        self, results: list[WriteResult], files: Mapping[str, FileEntry], placements: Mapping[str, str]
    ) -> None:
        super().__init__(results)
        self.files, self.placements = dict(files), dict(placements)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Written, (list(self), self.files, self.placements)


def tensor_entries(metadata: Metadata, placements: Mapping[str, str]) -> dict[str, TensorEntry]:
    """Manifest entries of a checkpoint's tensors, by name. A tensor without an entry in `placements` gets the placement
    "unknown" in the manifest.
    """
    return {
        name: TensorEntry(tuple(entry.size), _dtype_name(entry), placements.get(name, "unknown"))
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    }


def value_names(metadata: Metadata) -> tuple[str, ...]:
    """Names of the stored values that are not tensors."""
    entries = metadata.state_dict_metadata.items()
    return tuple(sorted(name for name, entry in entries if isinstance(entry, BytesStorageMetadata)))


def _dtype_name(entry: TensorStorageMetadata) -> str:
    return str(entry.properties.dtype).removeprefix("torch.")


class HashingStreams(FileSystemBase):
    """Adapter through which PyTorch reads and writes the files of a `Folder`. A path is the name of a file in the
    folder. Written files are hashed.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.files: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: _Path, mode: str) -> Iterator[Any]:
        """Open a file of the folder, for reading if `mode` is "rb" and for writing in all other cases."""
        name = os.fspath(path)
        if mode == "rb":
            with self.folder.open(name) as file:
                yield file
            return
        with self.folder.create(name) as file:
            stream = _HashingStream(file)
            yield stream
        self.files[name] = FileEntry(stream.size, stream.digest.hexdigest())

    def concat_path(self, path: _Path, suffix: str) -> str:  # noqa: ARG002
        """Return `suffix`, because a file's path is only its name in the folder."""
        return suffix

    def rename(self, path: _Path, new_path: _Path) -> None:
        """Rename a file to its final name."""
        old, new = os.fspath(path), os.fspath(new_path)
        self.folder.rename(old, new)
        self.files[new] = self.files.pop(old)

    def exists(self, path: _Path) -> bool:
        """Whether a file with this name exists."""
        return os.fspath(path) in self.folder.files()

    def init_path(self, path: _Path) -> _Path:
        """Return the path unchanged."""
        return path

    def mkdir(self, path: _Path) -> None:
        """Do nothing, because the coordinator creates the folder."""

    def rm_file(self, path: _Path) -> None:
        """Raise `NotImplementedError`. PyTorch never calls this method, because a draft has no older files to
        remove.
        """
        raise NotImplementedError

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Raise `NotImplementedError`. PyTorch never calls this method, because it does not have to choose a storage by
        path.
        """
        raise NotImplementedError


class _HashingStream(io.RawIOBase):
    """Stream that writes to a file, and counts and hashes the bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self.file, self.digest, self.size = file, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written = memoryview(data).cast("B")
        self.file.write(written)
        self.digest.update(written)
        self.size += len(written)
        return len(written)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Do nothing, because the file is flushed once, when it is complete."""
