"""Which type every value has over a mesh axis: the batch by rule, tensor parallelism by price."""
