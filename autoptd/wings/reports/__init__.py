"""What people read of a compiled program or of a run: summary, report, pictures, differences, progress."""
