"""Programs that show jax_fa4 at work; each is run with `python -m examples.NAME`."""
