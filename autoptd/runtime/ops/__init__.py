"""Provide the functions that emitted files call: conversions between value types, and sharded operators."""
