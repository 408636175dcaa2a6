"""Models and situations that once gave wrong numbers, crashed or hung: right numbers now, or one clear error."""
