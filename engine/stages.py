"""What a drafter does inside a phase, by name: the table that gives ranges to a profile, and only to a profile.

Owns the table and, while a profile is recorded, the wrapping of the methods it names. Between profiles these methods are
the plain ones, so a name costs nothing and no drafter opens, closes or imports anything. Used by `engine.recorder` on
the step thread. A drafter that is not here has the ranges of the phases alone.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType

Method = Callable[..., object]

_DRAFTERS = "engine.speculation."

# module -> class.method -> stage. In the trace the phase stands before it: "draft/markov", "observe/model_forward".
STAGES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        f"{_DRAFTERS}ngram": {"NgramSpeculator._lookup": "lookup"},
        f"{_DRAFTERS}prediction": {"PredictionSpeculator._continuation": "lookup"},
        f"{_DRAFTERS}suffix": {"SuffixSpeculator._proposal": "suffix_match"},
        f"{_DRAFTERS}suffix_cache": {"AnswerCache.extend": "suffix_tree"},
        f"{_DRAFTERS}synthetic": {"SyntheticSpeculator._tokens": "placeholders"},
        f"{_DRAFTERS}draft_model": {"DraftModelSpeculator._run": "model_forward"},
        f"{_DRAFTERS}eagle_head": {
            "EagleHead.write_keys": "head_keys",
            "EagleHead.forward": "head_forward",
            "EagleHead.logits": "head_logits",
        },
        f"{_DRAFTERS}mtp_head": {
            "MtpModule.write_keys": "head_keys",
            "MtpModule.forward": "head_forward",
            "MtpModule.logits": "head_logits",
        },
        f"{_DRAFTERS}frozen_kv_head": {
            "FrozenKvHead.forward": "head_forward",
            "FrozenKvHead.logits": "head_logits",
        },
        f"{_DRAFTERS}medusa_heads": {
            "MedusaHeads.read": "heads_read",
            "MedusaHeads.logits": "head_logits",
        },
        f"{_DRAFTERS}block_model": {
            "BlockModel.write_context": "block_context",
            "BlockModel.forward": "block_forward",
            "BlockModel.logits": "block_logits",
        },
        f"{_DRAFTERS}markov_head": {
            "MarkovHead.step": "markov",
            "ConfidenceHead.probability": "confidence",
        },
        f"{_DRAFTERS}uno": {"UnoSpeculator._guess": "noise_forward"},
        f"{_DRAFTERS}growing_tree": {
            "GrowingTree.extend": "tree",
            "GrowingTree.place": "tree",
            "GrowingTree.draft": "tree",
        },
        f"{_DRAFTERS}choice": {"Chooser.choose": "choose", "Chooser.of_target": "choose"},
        # No drafter's, but what one reads next to theirs: where the step's host waits for the device.
        "engine.runner": {"Runner.forward": "target_forward"},
        "engine.model_executor": {"ModelExecutor._read": "read_draft", "ModelExecutor._bring_back": "bring_back"},
    }
)

StageRange = Callable[[str], AbstractContextManager[object]]


class StageRanges:
    """Ranges around the methods of `STAGES` between `install` and `remove`, for every object of this process."""

    def __init__(self) -> None:
        self._replaced: list[tuple[type, str, Method]] = []

    def install(self, stage_range: StageRange) -> None:
        """`stage_range` is entered around each call. Raises RuntimeError while another profile has its ranges there."""
        found = list(named_methods())
        if any(hasattr(method, "__stage__") for _, _, method, _ in found):
            raise RuntimeError("another profile of this process names the drafters' stages")
        for owner, attribute, method, stage in found:
            setattr(owner, attribute, _ranged(method, stage, stage_range))
            self._replaced.append((owner, attribute, method))

    def remove(self) -> None:
        """Every method is the very one it was."""
        while self._replaced:
            owner, attribute, method = self._replaced.pop()
            setattr(owner, attribute, method)


def named_methods() -> Iterator[tuple[type, str, Method, str]]:
    """(class, its attribute, the method, stage) of the table, in the modules that are loaded."""
    for module_name, methods in STAGES.items():
        module = sys.modules.get(module_name)
        if module is None:  # a drafter nobody loaded is drafting nothing
            continue
        for path, stage in methods.items():
            class_name, attribute = path.split(".")
            owner: type = getattr(module, class_name)
            yield owner, attribute, vars(owner)[attribute], stage


def _ranged(method: Method, stage: str, stage_range: StageRange) -> Method:
    @functools.wraps(method)
    def ranged(*arguments: object, **named: object) -> object:
        with stage_range(stage):
            return method(*arguments, **named)

    ranged.__stage__ = stage  # type: ignore[attr-defined]  # how a second profile knows
    return ranged
