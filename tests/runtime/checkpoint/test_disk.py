"""Files of a checkpoint on the disk: their CRCs, and that the disk begins before all bytes are written."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import pytest

from autoptd.runtime.folders.disk import AHEAD_BYTES, BLOCK_BYTES, new_file


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice on files")
@pytest.mark.parametrize("is_known", [True, False])
def test_the_disk_begins_while_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """The advice covers what was written, in order, and a file system that does not know it takes none."""
    begun: list[tuple[int, int]] = []

    def advise(descriptor: int, start: int, count: int, advice: int) -> None:
        assert os.fstat(descriptor).st_size == start + count
        begun.append((start, count))
        if not is_known:
            raise OSError(errno.EINVAL, "not known here")

    monkeypatch.setattr(os, "posix_fadvise", advise)
    data = os.urandom(2 * AHEAD_BYTES + BLOCK_BYTES + 7)
    with new_file(tmp_path / "file") as file:
        file.write(b"head")
        file.write(data)
    assert (tmp_path / "file").read_bytes() == b"head" + data
    assert [start for start, _ in begun] == [0, begun[0][1]] and len(begun) == 2
    assert all(AHEAD_BYTES <= count < AHEAD_BYTES + BLOCK_BYTES for _, count in begun)
    blocks = [(b"head" + data)[at : at + BLOCK_BYTES] for at in range(0, 4 + len(data), BLOCK_BYTES)]
    assert file.crcs == [zlib.crc32(block) for block in blocks]
