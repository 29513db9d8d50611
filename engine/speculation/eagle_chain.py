"""Drafting one token after the other: each output of the head predicts a token, which is fed back with it.

Owns the loop of a chain. Called by `eagle_drafter`. Source: EAGLE (arXiv 2401.15077, section 4.1), as a chain; the choice
of tokens is `engine.speculation.choice`'s. n = rows, W = max_draft_len, V = target's vocabulary.
"""

from collections.abc import Sequence

import torch

from engine.speculation.choice import Chooser
from engine.speculation.draft import Draft
from engine.speculation.draft_step import DraftSpan
from engine.speculation.eagle_passes import EaglePasses, EagleRow


def draft_chains(passes: EaglePasses, rows: Sequence[EagleRow], width: int, is_sampled: bool) -> Draft:
    """`budget` tokens for each of at least one row; with `is_sampled` drawn, and with what they were drawn from."""
    head, pool = passes.head, passes.pool
    device, vocab_size = pool.device, head.arch.vocab_size
    tokens = torch.zeros(len(rows), width, dtype=torch.int32, device=device)
    probs = torch.zeros(len(rows), width, vocab_size, device=device) if is_sampled else None
    active = list(range(len(rows)))
    where = pool.slots_tensor(active)
    chooser = Chooser([row.asked for row in rows], vocab_size, device) if is_sampled else None
    hidden = passes.first(rows)
    num_steps = max(row.budget for row in rows)
    for step in range(num_steps):
        logits = head.logits(hidden)
        if chooser is None or probs is None:
            chosen = head.target_tokens(logits.argmax(dim=1))
        else:
            positions = pool.slots_tensor([rows[index].root + 1 + step for index in active])
            chosen, drawn_from = chooser.choose(head.target_logits(logits), positions)
            probs[where, step] = drawn_from
        tokens[where, step] = chosen.to(torch.int32)
        staying = [place for place, index in enumerate(active) if rows[index].budget > step + 1]
        if not staying:
            break
        features = head.fed_back(hidden)
        if len(staying) < len(active):
            kept = pool.slots_tensor(staying)
            features, chosen = features[kept], chosen[kept]
            active = [active[place] for place in staying]
            where = pool.slots_tensor(active)
            if is_sampled:
                chooser = Chooser([rows[index].asked for index in active], vocab_size, device)
        spans = [DraftSpan(rows[index].root + step, 1, rows[index].asked.block_ids) for index in active]
        hidden = passes.run(spans, features, chosen, writes=True)
    return Draft(
        tokens=tokens,
        lengths=torch.tensor([row.budget for row in rows], dtype=torch.int32).to(device),
        parents=None,
        probs=probs,
        roots=None,
        sources=torch.zeros(len(rows), dtype=torch.int8, device=device),
        num_forwards=num_steps,
    )
