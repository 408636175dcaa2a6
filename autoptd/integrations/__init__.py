"""Trainers of other libraries, over a `ParallelModel`. Nothing else of AutoPTD imports them."""
