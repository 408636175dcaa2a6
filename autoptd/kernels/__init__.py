"""Dropout and fused operators, each with a plain, an eager (torch) and a Triton form: see `forms.py`."""
