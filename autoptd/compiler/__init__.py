"""Compile a model and a request to a `Program`: `driver.py` is the table of contents."""
