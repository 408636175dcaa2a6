"""The cost model of Subramanian et al. (arXiv:2410.00273), as their published code computes it, to compare with.

Three steps, as in the paper: S1 counts the work of every operator of a layer (`operators`), S2 turns work into seconds
(`times`, `model`), S3 is the search, which is the planner's own (`autoptd.wings.planner.search`). What their code does and a
machine would not is a switch of `Quirks`. Nothing here knows a graph: a transformer is five numbers.

    from autoptd.wings.planner.search import search
    from benchmarks.lib.subramanian import GPT3_1T, SYSTEMS, SubramanianModel
    model = SubramanianModel(GPT3_1T, SYSTEMS["A100"].with_domain(4), gpus=4096, batch=4096, tensor="1D")
    search(model).seconds[0]                   # 70.996
"""

from benchmarks.lib.subramanian.model import SubramanianModel
from benchmarks.lib.subramanian.system import (
    CORRECTED,
    GPT3_1T,
    PUBLISHED,
    SYSTEMS,
    TENSOR_MODES,
    VIT_64K,
    Quirks,
    System,
    Transformer,
)

__all__ = [
    "CORRECTED",
    "GPT3_1T",
    "PUBLISHED",
    "SYSTEMS",
    "TENSOR_MODES",
    "VIT_64K",
    "Quirks",
    "SubramanianModel",
    "System",
    "Transformer",
]
