"""Reductions over what is kept."""

from __future__ import annotations

from maskwise.ops.reduce.api import (
    all as all,
)
from maskwise.ops.reduce.api import (
    amax as amax,
)
from maskwise.ops.reduce.api import (
    amin as amin,
)
from maskwise.ops.reduce.api import (
    any as any,
)
from maskwise.ops.reduce.api import (
    argmax as argmax,
)
from maskwise.ops.reduce.api import (
    argmin as argmin,
)
from maskwise.ops.reduce.api import (
    count as count,
)
from maskwise.ops.reduce.api import (
    logsumexp as logsumexp,
)
from maskwise.ops.reduce.api import (
    mean as mean,
)
from maskwise.ops.reduce.api import (
    norm as norm,
)
from maskwise.ops.reduce.api import (
    prod as prod,
)
from maskwise.ops.reduce.api import (
    std as std,
)
from maskwise.ops.reduce.api import (
    sum as sum,
)
from maskwise.ops.reduce.api import (
    var as var,
)

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "count", "logsumexp", "mean", "norm", "prod", "std", "sum", "var",
]  # fmt: skip
