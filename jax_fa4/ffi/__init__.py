"""Typed wrappers of the custom calls: operands, results, attributes, and the registration of their targets."""
