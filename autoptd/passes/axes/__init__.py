"""Which dims run together: named axes of every tensor, and what constants say about them."""
