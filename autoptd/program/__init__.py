"""Define the plain data that the compiler passes to the runtime: a program, its transfers, sums and calls."""
