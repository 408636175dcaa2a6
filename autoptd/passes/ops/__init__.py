"""What is known of an operator: how its dims correspond, in which operands it is linear, what it costs."""
