"""`--speculator first_of:A,B,...`: one drafter of several, checked before any of them is built.

Owns what the members are together, and which cannot be. Called by the registry.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TypeVar

from engine.speculation.first_of import FirstOfSpeculator
from engine.speculation.recipe import Progress, Recipe, Target
from engine.speculation.speculator import Capabilities, Speculator

_Item = TypeVar("_Item")


class FirstOfRecipe(Recipe):
    """Raises ValueError naming the members that cannot draft side by side."""

    def __init__(self, recipes: Mapping[str, Recipe], vocab_size: int) -> None:
        """`recipes` by the members' names, in the order in which they are asked."""
        self._recipes = tuple(recipes.values())
        self._vocab_size = vocab_size
        self.capabilities = combined({name: recipe.capabilities for name, recipe in recipes.items()})
        self.weight_bytes = sum(recipe.weight_bytes for recipe in self._recipes)

    @property
    def kv_bytes_per_token(self) -> int:
        """Every member keeps its own keys and values."""
        return sum(recipe.kv_bytes_per_token for recipe in self._recipes)

    def build(self, target: Target, on_progress: Progress | None = None) -> Speculator:
        members = [recipe.build(target, on_progress) for recipe in self._recipes]
        return FirstOfSpeculator(members, self.capabilities, self._vocab_size)


def combined(members: Mapping[str, Capabilities]) -> Capabilities:
    """What drafters that are asked one after the other are together. Raises ValueError for a mix that cannot work."""
    trees = [name for name, member in members.items() if member.tree]
    draws = [name for name, member in members.items() if member.gives_probs]
    if trees and draws:
        # The verdict on a tree reads no probabilities: a draw would be judged as if it were certain, and lose by that.
        raise ValueError(
            f"--speculator first_of: {', '.join(trees)} drafts trees and {', '.join(draws)} draws its tokens, which no "
            "verdict takes together: say --draft-sampling greedy, or let the other draft chains"
        )
    every = list(members.values())
    return Capabilities(
        max_draft_len=max(member.max_draft_len for member in every),
        sources=_distinct([member.sources for member in every]),
        tree=bool(trees),
        drafts_on_host=all(member.drafts_on_host for member in every),  # else they hear all rows at once, see `observe`
        gives_probs=bool(draws),
        taps=_distinct([member.taps for member in every]),
        lookahead=max(member.lookahead for member in every),
        # A row that one member cannot serve is left to the others.
        unsupported_sampling=reduce(frozenset.intersection, [member.unsupported_sampling for member in every]),
    )


def _distinct(lists: Sequence[tuple[_Item, ...]]) -> tuple[_Item, ...]:
    """All entries once, in the order of their first appearance."""
    return tuple(dict.fromkeys(item for items in lists for item in items))
