"""What the compiler hands to the runtime, as plain data: the program, what it sends, what it sums, and its calls."""
