"""What several engines are together, as far as a request must fit them.

Owns the rule; keeps nothing and asks nobody. Called by `frontend.engine_pool`.
"""

from collections.abc import Sequence

import msgspec

from protocol.messages import Hello


def together(hellos: Sequence[Hello]) -> Hello:
    """One Hello for the limits of all: a request must fit whichever engine it meets, and their queues add up."""
    first = hellos[0]
    if len(hellos) == 1:
        return first
    capacities = [hello.capacity for hello in hellos]
    block_size = first.capacity.block_size
    capacity = msgspec.structs.replace(
        first.capacity,
        max_model_len=min(one.max_model_len for one in capacities),
        max_num_seqs=sum(one.max_num_seqs for one in capacities),
        max_num_batched_tokens=min(one.max_num_batched_tokens for one in capacities),
        num_blocks=sum(one.num_blocks * one.block_size for one in capacities) // block_size,
        max_num_queued_requests=sum(one.max_num_queued_requests for one in capacities),
        max_num_queued_tokens=sum(one.max_num_queued_tokens for one in capacities),
    )
    return msgspec.structs.replace(
        first,
        capacity=capacity,
        # What one of them cannot draft from, a request must not rely on.
        sources=tuple(name for name in first.sources if all(name in hello.sources for hello in hellos)),
        max_draft_len=max(hello.max_draft_len for hello in hellos),
        synthetic=next((hello.synthetic for hello in hellos if hello.synthetic), ""),  # one is enough to doubt all text
        executor="sim" if all(hello.executor == "sim" for hello in hellos) else "model",
    )
