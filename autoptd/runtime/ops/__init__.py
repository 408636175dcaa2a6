"""What emitted files call: conversions between value types, and operators of which each rank has a part."""
