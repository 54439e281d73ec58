"""Which kind of file it is, by its first bytes."""

from __future__ import annotations

import pickle

from datastates.errors import CorruptCheckpointError
from datastates.reading import FileReader

ZIP, LEGACY, SAFETENSORS = "zip", "legacy", "safetensors"

_ZIP_MAGIC = b"PK\3\4"
#: The first object of a ``torch.save`` file that is no zip is this number.
#: Source: ``torch.serialization.MAGIC_NUMBER``.
_LEGACY_MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
_TAR_MAGIC_OFFSET, _TAR_MAGIC = 257, b"ustar"
_HEAD_BYTES = 512


def recognise(file: FileReader) -> str:
    """`ZIP` or `LEGACY` (both of ``torch.save``), or `SAFETENSORS`.

    Raises:
        CorruptCheckpointError: it is none of them.
    """
    head = file.read(0, min(_HEAD_BYTES, file.nbytes))
    if head.startswith(_ZIP_MAGIC):
        return ZIP
    if head.startswith(_LEGACY_MAGIC[:-1]) or head[_TAR_MAGIC_OFFSET:].startswith(_TAR_MAGIC):
        return LEGACY
    if file.path.endswith(".safetensors") or head[8:9] == b"{":
        return SAFETENSORS
    raise CorruptCheckpointError(
        f"{file.path}: {file.nbytes} bytes that begin with {head[:8]!r} are neither a torch.save file nor safetensors; "
        "the file is damaged or something else",
        file.path,
        offset=0,
    )
