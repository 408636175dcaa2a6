"""Describe operators: how their dims correspond, in which operands they are linear, and their cost."""
