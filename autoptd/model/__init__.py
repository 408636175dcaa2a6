"""What `parallelize` returns: the running model, its state, its sizes, and what watches the loop around it."""
