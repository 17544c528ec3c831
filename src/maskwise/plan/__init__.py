"""How a call runs: the dispatcher, its cost model, and the log of `mw.explain`.

``mw.plan`` is the function `maskwise.plan.dispatch.plan`; import from this package with ``from maskwise.plan...``. It
imports nothing by itself, because `maskwise` imports it before torch.
"""
