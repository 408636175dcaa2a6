"""Trace one layer of each kind, and copy its operators for the others."""
