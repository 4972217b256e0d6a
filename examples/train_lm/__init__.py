"""Train a byte-level language model on packed documents, with attention by jax_fa4.

Read `data.py` (documents into rows), `model.py` (the transformer), `training.py` (loss, step, loop), `checks.py`
(does anything leak, and is it fast), `pictures.py`, then `__main__.py`, which runs them in this order.
"""
