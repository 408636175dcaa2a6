"""Write a file of the format of safetensors one tensor at a time, so that they are never in memory together.

In: names with dtypes and shapes, and the tensors in this order. Out: the file: the length of a header, the header as JSON, the
elements of all tensors end to end.

    write_safetensors(Path("model.safetensors"), {"w": (torch.float32, (4, 8))}, [w])
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from autoptd.runtime.folders.disk import new_file
from autoptd.runtime.folders.read_folder import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Bytes that a header is filled up to a multiple of.
ALIGNMENT = 8


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], values: Iterable[torch.Tensor]
) -> None:
    """Write the tensors `values`, of the dtypes and shapes that `tensors` says, in its order."""
    # transformers refuses a file without this entry.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with new_file(path) as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for x in values:
            if x.numel():
                own = x.detach().cpu().contiguous()
                elements = (ctypes.c_char * own.nbytes).from_address(own.data_ptr())
                file.write(memoryview(elements))


__all__ = ["write_safetensors"]
