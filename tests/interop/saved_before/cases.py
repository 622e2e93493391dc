"""All cases by name."""

from tests.interop.saved_before import folders
from tests.interop.saved_before.buffers import BUFFERS, PARTS, PARTS_OF_TRAINING
from tests.interop.saved_before.case import Case
from tests.interop.saved_before.functional import STATES
from tests.interop.saved_before.others import OTHERS

CASES: dict[str, Case[object]] = {  # type: ignore[dict-item]
    **BUFFERS,
    **PARTS,
    **PARTS_OF_TRAINING,
    **folders.CASES,
    **STATES,
    **OTHERS,
}
