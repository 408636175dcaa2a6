"""Optional parts around the compiler and the runtime: planner, pictures, reports, doctor, command line."""
