"""Access to a checkpoint's tensors one at a time, without the run, the model or the ranks that wrote it."""

import io
import pickle
import zipfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from crosscut.checkpoint.reader import FileSlice, saved_part
from crosscut.checkpoint.storage import Folder

METADATA_FILE = ".metadata"


class StoredTensors:
    """Tensors and values of a checkpoint, by flat name. The class does not check the file `.metadata`, so compare the
    file with the manifest's hash first.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.metadata: Metadata = pickle.loads(folder.read(METADATA_FILE))  # noqa: S301 - PyTorch's own format
        entries = self.metadata.state_dict_metadata.items()
        self.tensors = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
        self.values = sorted(name for name, _ in entries if name not in self.tensors)

    def read(self, name: str) -> Tensor:
        """Read a whole tensor, assembled from its shards."""
        entry = self.tensors[name]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            place = self._place(MetadataIndex(name, chunk.offsets))
            target = whole
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            with self.folder.open(place.relative_path) as file:
                part = saved_part(file, place, shape=tuple(chunk.sizes), dtype=whole.dtype)
                part.copy_to(target, file, offsets=(0,) * whole.dim())
        return whole

    def value(self, name: str) -> Any:
        """Read a stored value that is not a tensor, such as a learning rate."""
        place = self._place(MetadataIndex(name))
        with self.folder.open(place.relative_path) as file:
            file.seek(place.offset)
            return torch.load(io.BytesIO(file.read(place.length)), weights_only=True)

    def check(self) -> Iterator[str]:
        """Read all tensors and values, and yield a message for each damaged shard or value.

        `torch.save` stores a CRC-32 of each tensor, so a changed bit is found even without the hashes of a manifest.
        """
        for name, entry in self.tensors.items():
            covered = sum(chunk.sizes.numel() for chunk in entry.chunks)
            if covered != entry.size.numel():
                yield f"`{name}` must have {entry.size.numel():,} elements, but {covered:,} are stored"
        for index, place in self.metadata.storage_data.items():
            try:
                with (
                    self.folder.open(place.relative_path) as file,
                    zipfile.ZipFile(FileSlice(file, place.offset, place.length)) as archive,
                ):
                    damaged = archive.testzip()
            except (OSError, EOFError, zipfile.BadZipFile) as error:
                yield f"`{index.fqn}` in `{place.relative_path}` cannot be read: {error}"
                continue
            if damaged:
                yield f"`{index.fqn}` in `{place.relative_path}` fails its checksum"

    def _place(self, index: MetadataIndex) -> Any:
        return self.metadata.storage_data[index]
