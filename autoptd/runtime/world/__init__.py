"""Connect ranks: as threads of one process, or as processes on torch.distributed."""
