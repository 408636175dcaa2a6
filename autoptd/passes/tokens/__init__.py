"""Rewrites and passes for ranks that divide tokens, attention's queries included."""
