"""What is at a path, and whether it is whole: read from the files, without torch and JAX, and without building a buffer."""

from interop.looking.facts import Inspection, inspect
from interop.looking.path_kinds import UnknownPathError
from interop.looking.verification import Damage, Report, seal, verify

__all__ = ["Damage", "Inspection", "Report", "UnknownPathError", "inspect", "seal", "verify"]
