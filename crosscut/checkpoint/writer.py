"""Writing a checkpoint whole or not at all, as a storage of `torch.distributed.checkpoint`.

PyTorch's `FileSystemWriter` decides what goes into which file. What is ours: every stream is hashed as it is written,
so nothing is read again; the hashes travel to the coordinator with the results; and the coordinator, when all ranks
have written, adds `.metadata` and the manifest and puts the folder in its place. So when `dcp.save` returns, on any
rank, the checkpoint is there, and when it raises on any rank it raises on all.

Of PyTorch's internals this relies on: `FileSystemWriter` opens files through `self.fs.create_stream` and nothing else;
`write_data` returns the list that `finish` gets from each rank; `finish` writes `.metadata` through `self.fs`.
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
    """Plans from the live tensors' shapes and writes the copies in `staged`, this rank's parts by flat name."""

    def __init__(self, staged: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.staged = staged

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The copy for a tensor; other values are as they were when the state was taken."""
        if write_item.type == WriteItemType.BYTE_IO:
            data: Tensor | io.BytesIO = super().resolve_data(write_item)
            return data
        return self.staged[write_item.index.fqn]


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes one checkpoint. Every rank makes one; the coordinator's also publishes it."""

    def __init__(
        self,
        folder: Folder,
        progress: Progress,
        *,
        placements: Mapping[str, str],
        published: Callable[[], None] = lambda: None,
        failed: BaseException | None = None,
    ) -> None:
        """`published` is called on the coordinator when the checkpoint is in its place.

        `failed` is why this rank has nothing to write: all ranks then raise it.
        """
        # `Folder.create` flushes, also what PyTorch forgets to; and what is written lies in host memory already.
        super().__init__("unused", sync_files=False, per_thread_copy_ahead=0)
        self.folder, self.progress, self.placements = folder, progress, dict(placements)
        self.published, self.failed = published, failed
        self.draft = folder.draft()
        self.streams = HashingStreams(self.draft)
        self.fs, self.path = self.streams, str(folder)  # type: ignore[assignment] # only told apart by its methods

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Raise what went wrong before; the coordinator makes the folder once all are here."""
        if self.failed is not None:
            raise CheckpointError(
                f"`{self.folder}` must be copied before it is written, but could not be: {reason(self.failed)}."
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make an empty folder, of which a killed run may have left a part."""
        with self._told():
            self.draft.begin(MANIFEST_FILE)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and send its hash along with the results."""
        with self._told():
            results = super().write_data(plan, planner).value()
        future: Future[list[WriteResult]] = Future()
        future.set_result(_Written(results, self.streams.files, self.placements))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: complete the folder, and put it in its place."""
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
        """A folder may vanish and be made again while ranks write; what was in it is then gone."""
        present = self.draft.files()
        for name, entry in files.items():
            if present.get(name) != entry.size:
                raise CheckpointError(
                    f"`{self.draft}/{name}` must have the {entry.size:,} bytes that were written, but has "
                    f"{present.get(name, 0):,}: the folder was changed meanwhile."
                )

    @contextmanager
    def _told(self) -> Iterator[None]:
        """As `CheckpointError`, which can be sent to the other ranks, as an object store's own error may not."""
        with storage_errors_told(self.folder, "writable"):
            yield


class _Written(list[WriteResult]):
    """The results of one rank, with what they say of its files; a list, since that is what PyTorch carries."""

    def __init__(
        self, results: list[WriteResult], files: Mapping[str, FileEntry], placements: Mapping[str, str]
    ) -> None:
        super().__init__(results)
        self.files, self.placements = dict(files), dict(placements)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Written, (list(self), self.files, self.placements)


def tensor_entries(metadata: Metadata, placements: Mapping[str, str]) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint in the manifest's words, by name."""
    return {
        name: TensorEntry(tuple(entry.size), _dtype_name(entry), placements.get(name, "unknown"))
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    }


def value_names(metadata: Metadata) -> tuple[str, ...]:
    """The names of what is stored beside tensors."""
    entries = metadata.state_dict_metadata.items()
    return tuple(sorted(name for name, entry in entries if isinstance(entry, BytesStorageMetadata)))


def _dtype_name(entry: TensorStorageMetadata) -> str:
    return str(entry.properties.dtype).removeprefix("torch.")


class HashingStreams(FileSystemBase):
    """A `Folder` as PyTorch's reader and writer want to see it. Names are paths; what is written is hashed."""

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
        """The name of a file in the folder, which is the only one there is."""
        return suffix

    def rename(self, path: _Path, new_path: _Path) -> None:
        """Give a file its final name."""
        old, new = os.fspath(path), os.fspath(new_path)
        self.folder.rename(old, new)
        self.files[new] = self.files.pop(old)

    def exists(self, path: _Path) -> bool:
        """Whether there is a file of that name."""
        return os.fspath(path) in self.folder.files()

    def init_path(self, path: _Path) -> _Path:
        """Nothing to do."""
        return path

    def mkdir(self, path: _Path) -> None:
        """Nothing to do: the coordinator makes the folder."""

    def rm_file(self, path: _Path) -> None:
        """Never needed: a draft is new."""
        raise NotImplementedError

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Never asked: the folder is given."""
        raise NotImplementedError


class _HashingStream(io.RawIOBase):
    """Writes through to a file, counting and hashing."""

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
        """The file is flushed once, when it is whole."""
