"""Mistakes that the tests must notice: a piece of the engine's source, and what stands there instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    module: str  # of engine/
    source: str  # found exactly once in it
    instead: str


MUTANTS = [
    # -- block_pool ----------------------------------------------------------------------------------------
    Mutant("a skipped decrement", "memory.pool", "            counts[block] -= 1\n", "            pass\n"),
    Mutant(
        "a share that is not counted",
        "memory.pool",
        "        self._counts[block] += 1\n",
        "        self._counts[block] = 1\n",
    ),
    Mutant(
        "a block freed during its transfer",
        "memory.pool",
        "        if self._holds[block]:\n            return\n",
        "",
    ),
    Mutant("a forgotten unhold", "memory.pool", "        self._holds[block] -= 1\n", "        pass\n"),
    Mutant(
        "a held block stays evictable",
        "memory.pool",
        "        self._cached.pop(block, None)\n        self._resting",
        "        self._resting",
    ),
    Mutant("parents evicted before children", "memory.pool", "popitem(last=False)", "popitem(last=True)"),
    Mutant("an evicted block stays findable", "memory.pool", "        self._on_evict(block)\n", ""),
    Mutant(
        "an evicted block stays marked",
        "memory.pool",
        "        self._kept[block] = False\n        self.evictions",
        "        self.evictions",
    ),
    Mutant(
        "a shared block is evictable",
        "memory.pool",
        "            self._cached.pop(block, None)  # it may be in transfer instead\n",
        "",
    ),
    Mutant(
        "a freed block is forgotten",
        "memory.pool",
        "        else:\n            self._free.append(block)\n",
        "        else:\n            pass\n",
    ),
    Mutant(
        "a spilled block is evicted last",
        "memory.pool",
        "                self._cached.move_to_end(block, last=False)\n",
        "                self._cached.move_to_end(block)\n",
    ),
    # -- prefix_cache --------------------------------------------------------------------------------------
    Mutant(
        "tokens not compared on a hit",
        "memory.prefix_cache",
        "block is not None and prefix.equals(self._prefixes[block])",
        "block is not None",
    ),
    Mutant("hash without parent", "hashing", "digest(before + content,", "digest(content,"),
    Mutant("salt ignored", "hashing", ' + b"\\0" + salt.encode()', ""),
    Mutant("seed ignored", "hashing", "        self._seed = seed\n", "        self._seed = 0\n"),
    Mutant("model ignored", "hashing", 'digest(self._fingerprint + b"\\0"', 'digest(b"\\0"'),
    Mutant(
        "a digest keeps its evicted block",
        "memory.prefix_cache",
        "        del self._blocks[prefix.digest]\n",
        "",
    ),
    # -- host_tier -----------------------------------------------------------------------------------------
    Mutant(
        "a host block findable and not kept",
        "memory.host_tier",
        "cache.publish(prefix, block) == block:\n            self.pool.keep(block)\n",
        "cache.publish(prefix, block) == block:\n            pass\n",
    ),
    Mutant(
        "a host block kept and not findable",
        "memory.host_tier",
        "if cache.publish(prefix, block) == block:",
        "if not self.pool.is_kept(block):",
    ),
    Mutant(
        "shared blocks stored twice",
        "memory.host_tier",
        "            if block in placed:\n                self.pool.share(placed[block])\n",
        "            if block in ():\n                self.pool.share(placed[block])\n",
    ),
    Mutant(
        "one more table, not one more reference, in host memory",
        "memory.host_tier",
        "                self.pool.share(placed[block])\n",
        "                pass\n",
    ),
    Mutant("host blocks kept after the swap in", "memory.host_tier", "            self.drop(sequence)\n", ""),
    Mutant("a transfer that nothing holds", "memory.host_tier", "        self._device.hold(device)\n", ""),
    Mutant("a host block that no transfer holds", "memory.host_tier", "        self.pool.hold(host)\n", ""),
    Mutant(
        "a spilled block findable before it came",
        "memory.host_tier",
        "            self._start(moves.spills, SWAP_OUT, block, self.pool.allocate())\n",
        "            self._start(moves.spills, SWAP_OUT, block, self.pool.allocate())\n"
        "            self._publish(cache, device_cache.prefix(block), moves.spills[-1].host)\n",
    ),
    Mutant(
        "parents before children after a transfer",
        "memory.host_tier",
        "reversed((*moves.swap_out, *moves.swap_in))",
        "(*moves.swap_out, *moves.swap_in)",
    ),
    Mutant(
        "preempted beams share host blocks without references",
        "memory.host_tier",
        "        for block in child.host_blocks:\n            self.pool.share(block)\n",
        "",
    ),
    # -- block_manager -------------------------------------------------------------------------------------
    Mutant(
        "a writable block may be shared",
        "memory.manager",
        "self.pool.count(block) == 1 and",
        "self.pool.count(block) <= 2 and",
    ),
    Mutant("a pinned tail is written", "memory.manager", " and block not in self.tails and", " and"),
    Mutant(
        "a prompt that ends in a pinned tail has no token left to compute",
        "memory.manager",
        "sequence.tokens[num_blocks * self.block_size : -1]",
        "sequence.tokens[num_blocks * self.block_size :]",
    ),
    Mutant(
        "a pinned tail is shared by those whose tokens differ",
        "memory.pinned_tails",
        "int(differs[0]) if len(differs) else most",
        "most",
    ),
    Mutant(
        "a pinned tail stands for its tokens after any others",
        "memory.pinned_tails",
        "self._after.get(before, ())",
        "[tail for tails in self._after.values() for tail in tails]",
    ),
    Mutant("a findable block is written", "memory.manager", " and block not in self.cache\n", "\n"),
    Mutant(
        "the source of a copy is not held",
        "memory.manager",
        "        self.pool.hold(source)  # nobody may get it before the copy was made\n",
        "",
    ),
    Mutant(
        "the copied block stays in the table",
        "memory.manager",
        "        sequence.table[logical] = destination\n",
        "",
    ),
    Mutant(
        "the device is not told of a copy's table",
        "memory.manager",
        "        self.moves.entries[sequence.row, logical] = destination\n",
        "",
    ),
    Mutant(
        "the device is not told of the shared twin",
        "memory.manager",
        "                    self.moves.entries[sequence.row, logical] = found\n",
        "",
    ),
    Mutant(
        "a twin taken without a reference",
        "memory.manager",
        "                    pool.share(found)\n",
        "",
    ),
    Mutant(
        "freed first to last",
        "memory.moves",
        "pool.release(*reversed(blocks))",
        "pool.release(*blocks)",
    ),
    Mutant("published blocks outlive the table", "memory.manager", "        sequence.published = 0\n", ""),
    Mutant(
        "forks of a block that was computed twice no longer share it",
        "memory.manager",
        "                elif pool.count(block) == 1:\n",
        "                else:\n",
    ),
    Mutant(
        "moves of a row that was left are made all the same",
        "memory.manager",
        "self.moves.leave(sequence.row, 0, len(table))\n",
        "pass\n",
    ),
    Mutant(
        "a copy for a row that was left is made all the same",
        "memory.manager",
        "        self.moves.undo_copy(sequence.row, self.pool)\n",
        "",
    ),
    Mutant(
        "a copy for a block that a fork gave back is made all the same",
        "memory.manager",
        "            self.moves.undo_copy(child.row, self.pool)\n",
        "",
    ),
    Mutant(
        "an abandoned copy holds its source for ever",
        "memory.moves",
        "            pool.unhold(copy[0])\n",
        "            pass\n",
    ),
    Mutant(
        "a beam that follows another has not got its last tokens",
        "memory.manager",
        "            self._copy(child.row, parent.table[logical], table[logical])\n",
        "            pass\n",
    ),
    Mutant(
        "a beam's last tokens are copied to a block of others",
        "memory.manager",
        "            and self.is_writable(child, position)\n",
        "",
    ),
    Mutant(
        "a beam's last tokens are copied over what a transfer reads",
        "memory.manager",
        "            and not self.pool.is_held(child.table[logical])\n",
        "",
    ),
    Mutant(
        "a copy is not counted",
        "memory.manager",
        "        self.copies_on_write += 1\n",
        "",
    ),
    Mutant(
        "a fork keeps what it shares no more",
        "memory.manager",
        "                given_back.append(old)\n",
        "                pass\n",
    ),
    Mutant(
        "a fork stays where it was",
        "memory.manager",
        "            if old == new:\n",
        "            if old is not None:\n",
    ),
    Mutant(
        "a fork takes as many blocks for published as it had before",
        "memory.manager",
        "        child.published = min(parent.published, len(table))\n",
        "",
    ),
    Mutant(
        "the device hears of blocks that a fork gave back",
        "memory.manager",
        "                self.moves.entries.pop((child.row, logical), None)\n",
        "                pass\n",
    ),
    Mutant(
        "a fork without references",
        "memory.manager",
        "                self.pool.share(new)\n",
        "",
    ),
    Mutant(
        "host hits are read before they came",
        "memory.manager",
        "            sequence.table.append(self.host.bring(block, self.moves))\n",
        "            sequence.table.append(self.pool.allocate())\n",
    ),
    Mutant(
        "a hit whose parents are not compared",
        "hashing",
        "            mine, theirs = mine.before, theirs.before\n",
        "            break\n",
    ),
    Mutant(
        "the context is lost in a swap",
        "memory.manager",
        "            self._rows.context[sequence.row] = sequence.saved_context\n",
        "            pass\n",
    ),
    # -- computing blocks ----------------------------------------------------------------------------------
    Mutant(
        "a computing block that nobody forgets",
        "memory.moves",
        "        for block in cache.computing.intersection(blocks):\n",
        "        for block in cache.computing.intersection(()):\n",
    ),
    Mutant(
        "a computing block forgotten while others share it",
        "memory.moves",
        "            if not pool.count(block):\n",
        "            if True:\n",
    ),
    Mutant(
        "a computing block for every tenant",
        "memory.prefix_cache",
        "        return block if block is not None and prefix.equals",
        "        for other in self.computing:\n"
        "            if self._prefixes[other].content == prefix.content:\n"
        "                return other\n"
        "        return block if block is not None and prefix.equals",
    ),
    Mutant(
        "computing before it is planned",
        "memory.manager",
        "end // self.block_size)\n        blocks =",
        "min(len(sequence.table), sequence.num_tokens // self.block_size))\n        blocks =",
    ),
    Mutant(
        "a computing block published without its beginning",
        "memory.manager",
        "        sequence.published = next(computing, len(found.device))\n",
        "        sequence.published = len(found.device)\n",
    ),
    Mutant(
        "published while computing",
        "memory.manager",
        "        self.moves.written.update(blocks)\n",
        "        self.moves.written.update(blocks)\n"
        "        for block in self.cache.computing.intersection(blocks):\n"
        "            self.cache.publish(self.cache.prefix(block), block)\n"
        "            self.pool.keep(block)\n",
    ),
    Mutant(
        "published and still computing",
        "memory.prefix_cache",
        "                return block\n            self._computed(block)\n",
        "                return block\n",
    ),
    Mutant(
        "published beside a computing block of the same",
        "memory.prefix_cache",
        "            self.forget(found)\n",
        "            pass\n",
    ),
    Mutant(
        "a copy of what is not written yet",
        "schedule.finding",
        "if is_whole(state, sequence, found) and blocks.is_computing(found):",
        "if False:",
    ),
    Mutant(
        "swapped out while this step writes what it shares",
        "schedule.preemption",
        " or not self._blocks.is_written(group)",
        "",
    ),
    Mutant(
        "what failed stays findable",
        "schedule.lifecycle",
        "        state.blocks.forget(sequence)\n",
        "        pass\n",
    ),
    Mutant(
        "what failed is kept",
        "memory.manager",
        "            pool.discard(block)\n",
        "            pass\n",
    ),
    Mutant(
        "who took over what failed keeps it",
        "memory.manager",
        "min(sequence.num_found, sequence.published)",
        "min(sequence.num_found, len(found))",
    ),
    # -- transfers -----------------------------------------------------------------------------------------
    Mutant(
        "booked before the transfers are done",
        "core",
        "while transfers and transfers[0].are_done(wait=wait):",
        "while transfers:",
    ),
    Mutant(
        "given out as soon as the step is done",
        "schedule.commit",
        "        state.transfers.append(step.transfers)\n",
        "        state.transfers.append(step.transfers)\n        finish_transfers(state)\n",
    ),
    # -- scheduler -----------------------------------------------------------------------------------------
    Mutant(
        "the oldest is preempted",
        "schedule.preemption",
        "        group = self._state.running[-1]\n",
        "        group = self._state.running[0]\n"
        "        self._state.running.append(self._state.running.pop(0))\n",
    ),
    Mutant(
        "the oldest is preempted when it could wait",
        "schedule.preemption",
        "if newest.transferring or alone:",
        "if newest.transferring:",
    ),
    Mutant(
        "a victim waits behind all others",
        "schedule.lifecycle",
        'insort(state.waiting, group, key=attrgetter("order"))',
        "state.waiting.append(group)",
    ),
    Mutant(
        "others are admitted while a group is swapped out",
        "schedule.scheduler",
        "        available = self.blocks.pool.num_available\n",
        "        available = self.blocks.pool.num_available\n"
        "        if state.waiting and state.waiting[0].swapped:\n"
        "            state.waiting.rotate(-1)\n",
    ),
    Mutant(
        "a group is admitted in part",
        "schedule.scheduler",
        "len(group.live) > self.rows.num_free",
        "not self.rows.num_free",
    ),
    Mutant(
        "room only for what the prompts share",
        "schedule.finding",
        "blocks.blocks_for(length) - shared for length",
        "0 for length",
    ),
    Mutant(
        "used before it has arrived",
        "schedule.draft",
        "        group.transferring = True\n",
        "",
    ),
    Mutant(
        "an arrival forgotten",
        "schedule.draft",
        "        self.transferring.append(group)\n",
        "",
    ),
    Mutant(
        "published when launched",
        "schedule.scheduler",
        "        state.in_flight.append(step)\n",
        "        state.in_flight.append(step)\n"
        "        for sequence, full in step.filled:\n"
        "            known = sequence.num_tokens // self.blocks.block_size\n"
        "            self.blocks.publish(sequence, min(full, known))\n",
    ),
    Mutant(
        "a victim's decode goes on",
        "schedule.scheduler",
        "            decodes = decodes[self.rows.decoding[decodes]]\n",
        "",
    ),
    Mutant("a victim's prefill goes on", "schedule.scheduler", "            draft.forget_preempted()\n", ""),
    Mutant(
        "swapped out while this step writes to it",
        "schedule.preemption",
        "swap = not drafted and ",
        "swap = ",
    ),
    Mutant(
        "host blocks of who left are kept",
        "memory.manager",
        "        self.host.drop(sequence)\n",
        "",
    ),
    Mutant(
        "a row without a block goes on",
        "schedule.scheduler",
        "rows = rows[~np.isin(rows, list(draft.stalled))]",
        "rows = rows[:]",
    ),
    Mutant(
        "the tail after a fork is written by all",
        "schedule.scheduler",
        "            lifecycle.expect_write(self.state, other)\n",
        "            pass\n",
    ),
    Mutant(
        "what comes back goes on from a stale token",
        "schedule.scheduler",
        "                self.state.overrides[sequence.row] = int(sequence.tokens[-1])\n",
        "                pass\n",
    ),
    Mutant(
        "a prefill writes into a found block",
        "schedule.scheduler",
        "if start < rows.capacity[row]:",
        "if start < 0:",
    ),
    Mutant(
        "a step past the last token",
        "schedule.scheduler",
        "            rows = rows[more]\n",
        "            pass\n",
    ),
    Mutant("the budget is not spent", "schedule.scheduler", "            draft.budget -= end - start\n", ""),
    Mutant(
        "blocks are published for a sequence that left",
        "memory.manager",
        "            if sequence.row == NO_ROW:\n",
        "            if False:\n",
    ),
    Mutant(
        "a token for a sequence that has ended",
        "schedule.commit",
        "        if sequence.finish_reason is not None:\n            continue\n",
        "",
    ),
    # -- beam_group ----------------------------------------------------------------------------------------
    Mutant(
        "a beam keeps the digests of the one it was",
        "memory.manager",
        "        child.prefixes = parent.prefixes[: len(table)]\n",
        "",
    ),
    Mutant(
        "a fork in host memory keeps what it had there",
        "memory.host_tier",
        "        self.drop(child)\n",
        "",
    ),
    Mutant(
        "a preempted beam keeps the digests of the one it was",
        "memory.host_tier",
        "        child.prefixes = list(parent.prefixes)\n",
        "",
    ),
    Mutant(
        "a beam that follows another gives its last block back",
        "schedule.beams",
        "                shares |= blocks.follow(parent, child)\n",
        "                blocks.fork(parent, child)\n                shares = True\n",
    ),
    Mutant(
        "nobody hears that two beams are to write to the same block",
        "memory.manager",
        "        return begun and not copied\n",
        "        return False\n",
    ),
    Mutant(
        "a beam that ended keeps its blocks",
        "schedule.beams",
        "            blocks.free(sequence)\n",
        "",
    ),
    Mutant(
        "a beam that ended in host memory keeps its blocks",
        "schedule.beams",
        "            blocks.host.drop(sequence)\n",
        "            pass\n",
    ),
    Mutant(
        "a copy that is not going to be made is swapped out",
        "memory.manager",
        "[sources.get(b, b) for b in sequence.table]",
        "list(sequence.table)",
    ),
    Mutant(
        "beams decode before they are chosen",
        "schedule.commit",
        "    elif group.beams is None or not group.beams.pending:\n",
        "    else:\n",
    ),
    Mutant(
        "after what is open to all, everything is",
        "hashing",
        "                before = self._root(salt, before)\n",
        '                before = self._root("", before)\n',
    ),
    Mutant(
        "a pinned block is evicted once it was used",
        "memory.pool",
        "        if block in self._pinned:\n",
        "        if False:\n",
    ),
    Mutant(
        "requests are let in that need pinned blocks",
        "schedule.lifecycle",
        "state.blocks.pool.num_blocks - state.blocks.pool.num_pinned",
        "state.capacity.num_blocks",
    ),
    # -- rows and samples ----------------------------------------------------------------------------------
    Mutant(
        "the last token ends nothing",
        "schedule.draft",
        "samples.needs_host | (positions >= samples.limit)",
        "samples.needs_host",
    ),
    Mutant(
        "a stop token ends nothing",
        "schedule.commit",
        "needs_host = needs_host | (ending > 0)",
        "needs_host = needs_host | (result.tokens == NOT_FINITE)",
    ),
    Mutant(
        "a token at the wrong position",
        "sequences.row_tokens",
        "rows * self._row_size + positions]",
        "rows * self._row_size + positions - 1]",
    ),
    Mutant("tokens that nobody counts", "sequences.row_tokens", "        self._last[rows] = positions\n", ""),
    Mutant(
        "a row that was left keeps its tokens",
        "sequences.sequence",
        "        self._row_tokens.clear(self.row)\n",
        "",
    ),
    Mutant(
        "a view of a row that others get is kept",
        "sequences.sequence",
        "        self._own = self.tokens.copy()\n",
        "        self._own = self.tokens\n",
    ),
    Mutant(
        "a step in flight writes to a row that its sequence has left",
        "schedule.lifecycle",
        "        step.forget_row(sequence)\n",
        "        if sequence.finish_reason is not None:\n            step.forget_row(sequence)\n",
    ),
    Mutant(
        "who ended in flight goes on",
        "schedule.lifecycle",
        "        step.forget_row(sequence)\n",
        "        pass\n",
    ),
    Mutant(
        "rows decode after they were left",
        "sequences.rows",
        "        self._decodes = None\n\n    def decodes",
        "\n    def decodes",
    ),
    Mutant(
        "samples of whom the rows were before",
        "sequences.rows",
        "not np.array_equal(rows, self._sampled)",
        "len(rows) != len(self._sampled)",
    ),
    Mutant(
        "blocks that the device is not told of",
        "memory.manager",
        "            entries[row, len(table)] = block\n",
        "",
    ),
    # -- window groups -------------------------------------------------------------------------------------
    Mutant(
        "a block that a window still reaches is given back",
        "memory.window_group",
        "        return max(0, position + 1 - self.window) // self._block_size\n",
        "        return max(0, position + 2 - self.window) // self._block_size\n",
    ),
    Mutant(
        "a window that is no longer cached is found",
        "memory.window_match",
        "        if logical >= first:  # nothing that reads this block can be found\n",
        "        if False:\n",
    ),
    Mutant(
        "a window is looked for in one group only",
        "memory.window_match",
        "            end, at = logical, 0\n",
        "            end = logical\n",
    ),
    Mutant(
        "a window's block that is given back stays in the pool",
        "memory.window_groups",
        "            moves.release(behind, self._pool, group.cache)\n",
        "",
    ),
    Mutant(
        "a computing block of a window that nobody forgets",
        "memory.window_groups",
        "            moves.release(table.blocks, self._pool, group.cache)\n",
        "            self._pool.release(*reversed(table.blocks))\n",
    ),
    Mutant(
        "a fork of a window without references",
        "memory.window_groups",
        "            self._pool.share(new)\n",
        "",
    ),
    Mutant(
        "a block that others share is written in a window group",
        "memory.window_groups",
        "        return self._pool.count(block) == 1 and block not in group.cache\n",
        "        return True\n",
    ),
    Mutant(
        "the device is not told of a copy's table in a window group",
        "memory.window_groups",
        "                moves.entries[row, logical] = destination\n",
        "",
    ),
    Mutant(
        "the device is not told of the shared twin in a window group",
        "memory.window_groups",
        "                    moves.entries[row, logical] = found\n",
        "",
    ),
    Mutant(
        "the device is not told of the windows of who comes back",
        "memory.window_groups",
        "            moves.enter(row, table.first, table.blocks)\n",
        "            pass\n",
    ),
    Mutant(
        "a window's block in host memory is taken for one of the device",
        "memory.window_groups",
        "                block = bring(table.block(logical))\n",
        "                block = table.block(logical)\n                self._pool.share(block)\n",
    ),
    Mutant(
        "a window that came from host memory is not found on the device",
        "memory.window_groups",
        "                if logical in part.on_host or block in group.cache.computing:\n",
        "                if block in group.cache.computing:\n",
    ),
    Mutant(
        "a spilled block is found in another group",
        "memory.host_tier",
        "            cache, device_cache = self._caches_of(spill.device)\n",
        "            _, device_cache = self._caches_of(spill.device)\n            cache = self.cache\n",
    ),
    Mutant(
        "what a row gave back is counted for the next in it",
        "memory.window_groups",
        "        self._rows.given_back[sequence.row] = 0\n",
        "",
    ),
    # -- grammars ------------------------------------------------------------------------------------------
    Mutant(
        "a token that its grammar does not hear of",
        "schedule.commit",
        "            sequence.constraint.accept(output.tokens[-1])\n",
        "",
    ),
    Mutant(
        "samples in one place of their grammar",
        "schedule.lifecycle",
        "constraint = constraint.fork()",
        "constraint = constraint",
    ),
    Mutant(
        "a grammar may end before min_tokens",
        "sequences.sequence",
        "        if self.num_generated < self.group.request.params.min_tokens:\n",
        "        if False:\n",
    ),
    Mutant(
        "a constrained row decodes without waiting",
        "schedule.scheduler",
        "                if group.in_lockstep:\n",
        "                if group.beams is not None:\n",
    ),
    # -- what was found before -----------------------------------------------------------------------------
    Mutant(
        "what was found is found for ever",
        "memory.prefix_cache",
        "        self._times_forgotten[block] += 1\n",
        "",
    ),
    Mutant(
        "what has become findable is not looked for",
        "memory.prefix_cache",
        "        device.follow(self.prefixes, end)\n",
        "        if not device.blocks:\n            device.follow(self.prefixes, end)\n",
    ),
    Mutant(
        "found in host memory although something before it is not",
        "memory.prefix_cache",
        "        if before.end >= self.begin:\n",
        "        if True:\n",
    ),
    Mutant(
        "found in host memory and on the device as well",
        "memory.prefix_cache",
        "            kept = slice(max(0, begin - self.begin), None)\n",
        "            kept = slice(0, None)\n",
    ),
    Mutant(
        "what was found for the tokens of another beam",
        "memory.manager",
        "if match is None or match.prefixes is not prefixes:",
        "if match is None:",
    ),
    Mutant(
        "a block that is given out counts as room",
        "memory.pool",
        "            self._evictable[block] = False\n            self._cached.pop",
        "            self._cached.pop",
    ),
    # -- what is left of a request that has ended ------------------------------------------------------------
    Mutant("a group that has ended keeps its sequences", "schedule.lifecycle", "    group.end()\n", ""),
    Mutant(
        "the last samples keep whose they were",
        "sequences.rows",
        "        self._samples = None  # which may name the sequence, and would keep it alive\n",
        "",
    ),
    Mutant(
        "a refusal keeps what it refuses",
        "sequences.grammar_queue",
        "refusal.with_traceback(None)",
        "refusal",
    ),
    Mutant(
        "an error keeps the step that raised it",
        "core",
        "        error.__traceback__ = None  # whose frames hold the step that holds the error: a cycle\n",
        "",
    ),
]
