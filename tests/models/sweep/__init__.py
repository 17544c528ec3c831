"""A sweep over transformers' classes: is each exact under ``mw.unpad``, refused with a reason, or neither?

``python -m tests.models.sweep --out table.json`` runs it; `--help` names what narrows it down.
"""
