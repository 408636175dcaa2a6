"""What ranks compare with each other, at run time."""
