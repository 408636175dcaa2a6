"""Facts of a compiled graph as plain records, for `Program` and the files in `out/`."""
