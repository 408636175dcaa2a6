"""What a step took: records, clocks, work, memory."""
