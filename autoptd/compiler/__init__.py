"""From a model and a request to a `Program`: `driver.py` is its table of contents."""
