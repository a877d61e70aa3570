"""Atomic writing of a checkpoint, as a storage writer of `torch.distributed.checkpoint`.

PyTorch's `FileSystemWriter` decides the contents of each file. This module adds the following. Every stream is hashed
while it is written, so no file is read again. The hashes are sent to the coordinator together with the results. When
all ranks have written their files, the coordinator adds `.metadata` and the manifest, and publishes the folder. So if
`dcp.save` returns on one rank, the checkpoint is complete, and if it raises on one rank, it raises on all.

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
    """Planner that plans with the shapes of the live tensors and writes the copies in `staged`, which holds this rank's
    parts by flat name.
    """

    def __init__(self, staged: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.staged = staged

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The copy of a tensor. Other values were already copied when the state was collected."""
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
        """Create the writer. `published` is called on the coordinator when the checkpoint is complete.

        `failed` is an error that leaves this rank with nothing to write. All ranks then raise it.
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
        """Raise an earlier error of this rank. Otherwise the coordinator creates the folder when all ranks have
        arrived.
        """
        if self.failed is not None:
            raise CheckpointError(
                f"`{self.folder}` must be copied to host memory first, but the copy failed: {reason(self.failed)}."
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create an empty folder. A killed run may have left a part of the same checkpoint."""
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
        """Complete the folder and publish it, on the coordinator."""
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
                    f"{present.get(name, 0):,}: the folder was changed in the meantime."
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
    """Manifest entries of a checkpoint's tensors, by name."""
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
    """Adapter that presents a `Folder` to PyTorch's reader and writer. A path is the name of a file, and written files
    are hashed.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.files: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: _Path, mode: str) -> Iterator[Any]:
        """Open a file of the folder."""
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
        """Name of a file in the folder; there are no other folders."""
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
        """Do nothing."""
        return path

    def mkdir(self, path: _Path) -> None:
        """Do nothing, because the coordinator creates the folder."""

    def rm_file(self, path: _Path) -> None:
        """Raise `NotImplementedError`. A draft is new, so no file is ever removed."""
        raise NotImplementedError

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Raise `NotImplementedError`. The folder is given, so PyTorch never asks."""
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
