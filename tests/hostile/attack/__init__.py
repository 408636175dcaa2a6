"""Whole models put together at random from tables of parts: what people write, several odd things at once."""
