"""What is built on the partitioner, and what it does without: the planner, pictures, reports, the doctor, the command line."""
