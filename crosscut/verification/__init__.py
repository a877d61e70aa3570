"""Proof that a layout computes the same training step as the uncut model (the whole model on one rank). If the proof
fails, the report names the first module that differs.
"""

from crosscut.verification.foreign.cuts import ForeignCut, prove_module, prove_on_mesh
from crosscut.verification.module import verify_module
from crosscut.verification.report import CallRow, FirstDifference, LayoutReport, ReportCheck, print_report
from crosscut.verification.run_proof import for_verification, scale_down, verify_on_mesh, verify_runs
from crosscut.verification.scope import with_scope

__all__ = [
    "CallRow",
    "FirstDifference",
    "ForeignCut",
    "LayoutReport",
    "ReportCheck",
    "for_verification",
    "print_report",
    "prove_module",
    "prove_on_mesh",
    "scale_down",
    "verify_module",
    "verify_on_mesh",
    "verify_runs",
    "with_scope",
]
