"""The lesson's four beams: how many blocks they take, and why it is not what the lesson says."""

from __future__ import annotations

from quire.engine.lab.pool import Pool

BEAMS, PROMPT, GENERATED = 4, 64, 10


def four_beams(pool: Pool, generated: int = GENERATED) -> str:
    """Run four beams over a prompt of 64 tokens, `generated` tokens each; return what they take, and why.

    Raises OutOfBlocks where the pool has too few blocks; those that were taken by then stay.
    """
    size, used, naive = pool.block_size, pool.used, pool.naive
    first = pool.sequence()
    first.append(PROMPT)
    beams = [first, *(first.fork() for _ in range(BEAMS - 1))]
    for beam in beams:
        beam.append(generated)
    used, naive = pool.used - used, pool.naive - naive
    prompt = -(-PROMPT // size)
    said = (
        f"{BEAMS} beams of a {PROMPT}-token prompt and {generated} tokens take {used} blocks, and {naive} if "
        f"nothing were shared: the prompt's {prompt}, which all beams name"
    )
    if PROMPT % size:
        said += ", but for a last one that is not full: all beams that write to it but one get a copy"
    said += f", and {used - prompt} for what the beams add."
    if size == 16:
        said += (
            " The lesson says 12 against 16. 16 is four copies of the prompt's 4 blocks alone, without what "
            "the beams add. 12 is 4 + 4 × 2: two blocks a beam, which its tokens need from the 17th on. "
            "10 tokens need one, so it is 4 + 4 × 1 = 8."
        )
    return said
