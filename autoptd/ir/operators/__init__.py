"""Operator knowledge: one record per operator, in `table.py`.

To add an operator, add its record next to similar ones in the table: a row of letters, or a link function of
`links.py` (for operators that compute) or `moves.py` (for those that move entries).
"""
