"""Which corruptions an output saw before it is measured on them, and lines composed so that none was seen.

Guards are taught by corrupted calibration images. To measure each family by a guard that never saw it, runs have
guards with families left out in turn; a composed output takes, family by family, the one that left it out.
"""

from __future__ import annotations

from doublehead.data import FAMILIES
from doublehead.training.config import LEFT_OUT

GUARD = "guarded"  # taught by all families
FAMILY_UNSEEN, KIND_UNSEEN = f"{GUARD}:family-unseen", f"{GUARD}:kind-unseen"
COMPOSED = {
    FAMILY_UNSEEN: tuple(f"{GUARD}@shifts-{name}" for name in ("1", "2", "3")),
    KIND_UNSEEN: tuple(f"{GUARD}@shifts-{name}" for name in ("noises", "blurs", "colours", "digital")),
}


def is_guard(output: str) -> bool:
    """Whether an output is a guard's, or composed of guards'."""
    return output.startswith(GUARD)


def seen(output: str) -> tuple[str, ...]:
    """The families that were in an output's training; for a composed one, of those it is measured on.

    >>> seen("both@noise+broad-1.1"), seen("auto"), len(seen("guarded")), seen("guarded:family-unseen")
    (('gaussian_noise',), (), 13, ())
    >>> [family for family in FAMILIES if family not in seen("guarded@shifts-blurs")]
    ['gaussian_blur', 'defocus_blur', 'motion_blur']
    """
    if output in COMPOSED:
        return ()
    kind, _, teacher = output.partition("@")
    if kind == GUARD:
        teacher = teacher or "shifts"
    else:
        teacher = teacher.rpartition("-")[0]  # a head's name ends in its beta0
    if teacher.startswith("shifts"):
        left_out = LEFT_OUT.get(teacher.removeprefix("shifts-"), ())
        return tuple(family for family in FAMILIES if family not in left_out)
    return ("gaussian_noise",) if "noise" in teacher.split("+") else ()


def parts(output: str, shift: str = "") -> tuple[str, ...]:
    """What an output stands for: itself, or the guards of a composed one; on a shifted set those that never saw it.

    >>> parts("auto"), parts("guarded:family-unseen", "contrast:3")
    (('auto',), ('guarded@shifts-1',))
    """
    family = shift.partition(":")[0]
    return tuple(
        part for part in COMPOSED.get(output, (output,)) if part == output or family not in seen(part)
    )
