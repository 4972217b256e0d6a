"""Typed wrappers of the custom calls, and the registration of their targets."""
