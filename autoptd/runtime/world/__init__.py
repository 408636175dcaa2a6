"""Ranks that communicate: as threads of one process, or as processes on torch.distributed."""
