"""Write a checkpoint atomically, through a storage writer for `torch.distributed.checkpoint`.

PyTorch decides which parts of the tensors each rank writes. Each rank writes its parts to one safetensors file and
hashes the bytes as it writes them, so no file is read again. The hashes are sent to the coordinator together with the
results. When all ranks have written their files, the coordinator adds the index and the manifest, and publishes the
folder. Therefore, if `dcp.save` returns on one rank, the checkpoint is complete, and if `dcp.save` raises an error on
one rank, it raises an error on all ranks.

The module relies on PyTorch to collect the lists that `write_data` returns on the ranks, and to pass them to `finish`
unchanged.
"""

import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from crosscut.checkpoint.damage import DATA_SUFFIX
from crosscut.checkpoint.folders import is_checkpoint_file, remove_checkpoint
from crosscut.checkpoint.format.index import INDEX_FILE, Index, IndexedTensor, TensorPart, dtype_name, dump_index
from crosscut.checkpoint.format.manifest import (
    FileEntry,
    JsonValue,
    Manifest,
    Progress,
    TensorEntry,
    current_versions,
    dump_manifest,
)
from crosscut.checkpoint.format.tensor_file import Form, file_header, tensor_bytes
from crosscut.checkpoint.saving.neighbours import NeighbourCopies
from crosscut.checkpoint.storage import Folder, LocalFolder, reason, storage_errors_told
from crosscut.config import CheckpointError
from crosscut.config.conventions import MANIFEST_FILE

_BLOCK_BYTES = 1 << 20
"""Number of bytes that are hashed and written at a time, small enough to stay in the CPU's cache."""


class CheckpointWriter(dcp.StorageWriter):
    """Writer of one checkpoint. Every rank creates a writer, and the coordinator's writer publishes the checkpoint."""

    def __init__(
        self,
        folder: Folder,
        progress: Progress,
        *,
        staged: Mapping[str, Tensor],
        placements: Mapping[str, str],
        published: Callable[[], None] = lambda: None,
        failed: BaseException | None = None,
    ) -> None:
        """Create the writer. PyTorch plans with the live tensors, and the writer writes the copies in `staged`, which
        holds this rank's parts by flat name. `published` is called on the coordinator when the checkpoint is complete.

        `failed` is an error of this rank, such as a failed copy. If an error is given, the save fails on all ranks.
        """
        self.folder, self.progress, self.staged, self.placements = folder, progress, staged, dict(placements)
        self.published, self.failed = published, failed
        self.draft = folder.draft()
        self.copies: NeighbourCopies | None = None
        """Exchange of files with other machines, for a checkpoint in memory. If it is set, the caller publishes the
        folder on every machine."""
        self._has_begun = False

    def set_up_storage_writer(self, is_coordinator: bool, *_: object) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged. Raises `CheckpointError` if the writer was created with an error in `failed`."""
        if self.failed is not None:
            raise CheckpointError(
                f"The state for `{self.folder}` must be copied to host memory, but the copy failed: "
                f"{reason(self.failed)}."
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign a file to each rank. The draft folder is emptied first, because a killed run may have left files of
        the same checkpoint.
        """
        with self._told():
            self.draft.begin(MANIFEST_FILE)
            self._has_begun = True
        return [dataclasses.replace(plan, storage_data=f"rank-{i}{DATA_SUFFIX}") for i, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors to its file. Values that are not tensors are sent to the coordinator with the
        results.
        """
        assert isinstance(planner, DefaultSavePlanner)
        values = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        results = [WriteResult(item.index, 0, planner.lookup_object(item.index)) for item in values]
        tensors = [(item.index, _form(item)) for item in plan.items if item.type != WriteItemType.BYTE_IO]
        # Tensors with the largest elements come first, so that every tensor is aligned to its element type.
        tensors.sort(key=lambda pair: (-pair[1].dtype.itemsize, pair[0].fqn))
        file: str = plan.storage_data
        with self._told(), self._spread(file), self.draft.create(file) as stream:
            written = _HashingStream(stream)
            written.write(file_header({index.fqn: form for index, form in tensors}))
            for index, form in tensors:
                start = written.size
                crc32 = written.write(tensor_bytes(self.staged[index.fqn]))
                part = TensorPart(tuple(index.offset or ()), form.shape, file, start, crc32)
                results.append(WriteResult(index, form.num_bytes, part))
        future: Future[list[WriteResult]] = Future()
        future.set_result(_RankResults(results, {file: written.entry()}, self.placements))
        return future

    @contextmanager
    def _spread(self, file: str) -> Iterator[None]:
        """Context in which this rank writes its file. With `copies`, the file is sent to another machine at the end,
        and a file of another machine is received, even if writing has failed.
        """
        if self.copies is None:
            yield
            return
        assert isinstance(self.draft, LocalFolder)
        is_written = False
        try:
            self.copies.begin(self.draft)
            yield
            is_written = True
        finally:
            self.copies.spread(self.draft, file, is_written=is_written)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and the manifest, and publish the folder unless `copies` is set. Runs only on the
        coordinator.
        """
        with self._told():
            index = _index(metadata, [result for written in results for result in written])
            content = dump_index(index)
            self.draft.write(INDEX_FILE, content)
            files = {INDEX_FILE: FileEntry(len(content), hashlib.sha256(content).hexdigest())}
            placements: dict[str, str] = {}
            for written in results:
                assert isinstance(written, _RankResults)
                files.update(written.files)
                placements.update(written.placements)
            if self.copies is None:
                self._require_present(files)
            manifest = Manifest(
                progress=self.progress,
                files=dict(sorted(files.items())),
                tensors=tensor_entries(index, placements),
                values=tuple(sorted(index.values)),
                versions=current_versions(),
            )
            self.draft.write(MANIFEST_FILE, dump_manifest(manifest))
            if self.copies is None:
                self.folder.publish(self.draft, MANIFEST_FILE, is_checkpoint_file)
                self.published()

    def discard(self) -> None:
        """Remove the files of a failed save, because they would take up space that the next checkpoint needs. Only the
        coordinator removes files. A file that cannot be removed is left in place.
        """
        if self._has_begun:
            with suppress(Exception):  # the storage may be the cause of the failure
                remove_checkpoint(self.draft)

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing, because a writer writes only one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Raise `NotImplementedError`. PyTorch calls this method only when the caller passes no writer."""
        raise NotImplementedError

    def _require_present(self, files: Mapping[str, FileEntry]) -> None:
        """Raise `CheckpointError` if files are missing, for example because somebody removed and recreated the folder
        during the save.
        """
        present = self.draft.files()
        for name, entry in files.items():
            if present.get(name) != entry.size:
                raise CheckpointError(
                    f"`{self.draft}/{name}` must have the {entry.size:,} bytes that were written, but has "
                    f"{present.get(name, 0):,}: the folder was changed during the save."
                )

    def _told(self) -> AbstractContextManager[None]:
        """Convert errors to `CheckpointError`, which can be sent to other ranks. The errors of an object store may not
        be picklable.
        """
        return storage_errors_told(self.folder, "writable")


class _RankResults(list[WriteResult]):
    """Results of one rank, with the hashes of its files. The class is a list because PyTorch sends a list to the
    coordinator.
    """

    def __init__(
        self, results: list[WriteResult], files: Mapping[str, FileEntry], placements: Mapping[str, str]
    ) -> None:
        super().__init__(results)
        self.files, self.placements = dict(files), dict(placements)

    def __reduce__(self) -> tuple[object, ...]:
        return _RankResults, (list(self), self.files, self.placements)


def _form(item: WriteItem) -> Form:
    assert item.tensor_data is not None
    return Form(tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype)


def _index(metadata: Metadata, results: list[WriteResult]) -> Index:
    parts: dict[str, list[TensorPart]] = {}
    values: dict[str, JsonValue] = {}
    for result in results:
        if isinstance(result.storage_data, TensorPart):
            parts.setdefault(result.index.fqn, []).append(result.storage_data)
        else:
            values[result.index.fqn] = result.storage_data
    tensors = {
        name: IndexedTensor(
            tuple(entry.size), entry.properties.dtype, tuple(sorted(parts[name], key=lambda part: part.offsets))
        )
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return Index(tensors, values)


def tensor_entries(index: Index, placements: Mapping[str, str]) -> dict[str, TensorEntry]:
    """Return the manifest entries of a checkpoint's tensors, keyed by name."""
    return {
        name: TensorEntry(entry.shape, dtype_name(entry.dtype), placements.get(name, "unknown"))
        for name, entry in sorted(index.tensors.items())
    }


class _HashingStream:
    """Stream that writes to a file, and counts and hashes the bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self.size = 0
        self._file, self._digest = file, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        """Write the bytes, and return their CRC-32."""
        content, crc32 = memoryview(data), 0
        for start in range(0, len(content), _BLOCK_BYTES):
            block = content[start : start + _BLOCK_BYTES]
            self._digest.update(block)
            crc32 = zlib.crc32(block, crc32)
            self._file.write(block)
        self.size += len(content)
        return crc32

    def entry(self) -> FileEntry:
        """Size and hash of the written bytes."""
        return FileEntry(self.size, self._digest.hexdigest())
