"""What is known of operators: one record each, in the file of its family, all of them in `table.TABLE`.

To add one, write its record beside its kin: `products`, `views`, `pieces`, `pointwise`, `reductions` or
`lookups`. No other file knows operators by name, but for patterns of fusion, the normal form of traces, and
what codegen writes of a few in words of its own.
"""
