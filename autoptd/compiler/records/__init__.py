"""The facts of a compiled graph as plain records: what `Program` stores, and what the files in `out/` say."""
