"""``mw.audit`` and ``mw.optimize``: what a model leaks and wastes, measured, and repaired where it can be."""

from __future__ import annotations

from maskwise.models.audit.api import audit as audit
from maskwise.models.audit.callbacks import LightningAudit as LightningAudit
from maskwise.models.audit.callbacks import TrainerAudit as TrainerAudit
from maskwise.models.audit.denominator import Denominator as Denominator
from maskwise.models.audit.leaks import Leak as Leak
from maskwise.models.audit.optimizing import Optimization as Optimization
from maskwise.models.audit.optimizing import optimize as optimize
from maskwise.models.audit.report import Audit as Audit
from maskwise.models.audit.report import Waste as Waste
from maskwise.models.audit.rewrites import Rewrite as Rewrite
from maskwise.models.audit.waste import Profile as Profile

__all__ = [
    "Audit",
    "Denominator",
    "Leak",
    "LightningAudit",
    "Optimization",
    "Profile",
    "Rewrite",
    "TrainerAudit",
    "Waste",
    "audit",
    "optimize",
]
