"""Folders of weights and adapters that other programs read and write."""
