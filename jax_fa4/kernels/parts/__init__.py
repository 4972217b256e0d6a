"""Pieces of device code that every kernel shares."""
