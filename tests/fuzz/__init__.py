"""Random small decoders on random meshes, held against themselves on one device: `python -m tests.fuzz --minutes 10`.

features.py   what can be drawn: a table of choices, the simplest first       -> Case
loaded.py     a state dict with other buffers is loaded, and trained and evaluated with
script.py     a case as a complete script: the model's source and the call    -> str
parts.py      the text of attention, MLP and norms
search.py     draw, run, count, shrink what fails
"""
