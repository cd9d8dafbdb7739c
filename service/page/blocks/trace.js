// The history as a trace that Perfetto and chrome://tracing open.

import { STATES } from "./updates.js";

const POOL = 1;
const REQUESTS = 2;
const KINDS = ["allocate", "hit", "fork", "release", "copy", "swap_out", "swap_in", "publish", "evict"];

const micros = (seconds, zero) => Math.round((seconds - zero) * 1e6);

/** Trace events: a track for each kind of move, counters of states, and a span for each request with blocks. */
export function traceOf(history) {
  const { changes, newest } = history;
  const begin = changes.length > 0 ? changes[0].then.at : newest.at;
  const zero = Math.min(begin, ...changes.slice(0, 1).flatMap(({ moves }) => moves.map(({ at }) => at)));
  const events = [name("process_name", POOL, 0, "KV cache blocks"), name("process_name", REQUESTS, 0, "Requests")];
  KINDS.forEach((kind, i) => events.push(name("thread_name", POOL, i + 1, kind)));
  const counts = countsAt(history);
  counts.forEach(({ at, ...args }) => events.push({ name: "blocks", ph: "C", pid: POOL, tid: 0, ts: micros(at, zero), args }));
  for (const { moves } of changes) {
    for (const { step, at, kind, block, other, request } of moves) {
      events.push({
        name: `${kind} ${block}`,
        cat: kind,
        ph: "i",
        s: "t",
        pid: POOL,
        tid: KINDS.indexOf(kind) + 1,
        ts: micros(at, zero),
        args: { step, block, ...(other >= 0 && { other }), ...(request >= 0 && { request }) },
      });
    }
  }
  for (const [request, { from, to, blocks }] of spansOf(history)) {
    events.push(name("thread_name", REQUESTS, request + 1, `request ${request}`));
    const span = { ts: micros(from, zero), dur: Math.max(1, micros(to, zero) - micros(from, zero)) };
    events.push({ name: `request ${request}`, ph: "X", pid: REQUESTS, tid: request + 1, ...span, args: { most_blocks: blocks } });
  }
  return { displayTimeUnit: "ms", otherData: { started: new Date(zero * 1000).toISOString(), block_size: newest.blockSize, num_blocks: newest.numBlocks }, traceEvents: events };
}

function name(kind, pid, tid, text) {
  return { name: kind, ph: "M", pid, tid, args: { name: text } };
}

/** How many device blocks were in each state after each change. */
function countsAt({ changes, newest }) {
  const counts = newest.counts();
  const moments = [];
  for (let i = changes.length - 1; i >= 0; i -= 1) {
    const { places, now, then } = changes[i];
    moments.push({ at: now.at, ...Object.fromEntries(STATES.map((state, k) => [state, counts[k]])) });
    places.forEach((place, k) => {
      if (place >= newest.numBlocks) return;
      counts[now.states[k]] -= 1;
      counts[then.states[k]] += 1;
    });
  }
  return moments.reverse();
}

/** By request, from when to when it was seen with blocks. */
function spansOf({ changes, newest }) {
  const spans = new Map();
  const see = (table, at) => {
    const span = spans.get(table.request) ?? { from: at, to: at, blocks: 0 };
    spans.set(table.request, { from: Math.min(span.from, at), to: Math.max(span.to, at), blocks: Math.max(span.blocks, table.blocks.length) });
  };
  for (const { now, then } of changes) {
    for (const table of then.tables.values()) if (table) see(table, now.at);
    for (const table of now.tables.values()) if (table) see(table, now.at);
  }
  for (const table of newest.tables.values()) see(table, newest.at);
  return spans;
}
