"""The names a user may give as `--speculator`, and what `first_of:A,B` is made of. Without torch.

Owns the list and the spelling; knows no drafter. Read by `engine.config` before anything is loaded and by the registry,
whose table must have these names.
"""

NONE = "none"
PREDICTION = "prediction"
SYNTHETIC = "synthetic"  # drafts whose fate is drawn, not judged: its text is not the target's
SPECULATORS: tuple[str, ...] = (
    NONE,
    "ngram",
    PREDICTION,
    "suffix",
    "draft_model",
    "eagle",
    "eagle3",
    "mtp",
    "medusa",
    "dflash",
    "dspark",
    "frozen_kv_mtp",
    SYNTHETIC,
    "uno",
)  # a new drafter adds its name here and its recipe in the registry
FIRST_OF = "first_of"
_FIRST_OF_PREFIX = f"{FIRST_OF}:"


def members_of(speculator: str) -> tuple[str, ...]:
    """The drafters that a speculator asks, in its order: itself, or those behind `first_of:`."""
    if not speculator.startswith(_FIRST_OF_PREFIX):
        return (speculator,)
    return tuple(speculator.removeprefix(_FIRST_OF_PREFIX).split(","))


def check_speculator(speculator: str) -> None:
    """Raise ValueError with the sentence for the user unless `speculator` names what can be started."""
    if not speculator.startswith(_FIRST_OF_PREFIX):
        if speculator not in SPECULATORS:
            known = f"{', '.join(SPECULATORS)} and {FIRST_OF}:A,B"
            raise ValueError(f"--speculator {speculator!r} is not known; known speculators are {known}")
        return
    members = members_of(speculator)
    # What is drawn instead of judged has no place beside drafts that are judged.
    drafters = [name for name in SPECULATORS if name not in (NONE, SYNTHETIC)]
    for name in members:
        if name not in drafters:
            raise ValueError(
                f"--speculator {speculator} cannot ask {name!r}; {FIRST_OF}: takes any of {', '.join(drafters)}"
            )
        if members.count(name) > 1:
            raise ValueError(f"--speculator {speculator} names {name} twice")
    if len(members) == 1:
        raise ValueError(f"--speculator {speculator} asks one drafter only: say --speculator {members[0]}")
