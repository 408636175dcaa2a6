"""Operator knowledge: one record per operator, in the file of its family, collected in `table.TABLE`.

To add an operator, write its record next to similar ones: `products`, `views`, `joins`, `pointwise`,
`reductions` or `lookups`. No other file refers to operators by name, except fusion patterns, the normal form
of traces, and special cases of codegen.
"""
