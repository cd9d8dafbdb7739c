// The small map of the KV cache's blocks, by the stream of their counts, with those of the chat that is shown. The whole
// map is the page /blocks.

import { request } from "./api.js";
import { followCounts } from "./counts.js";
import { element } from "./dom.js";

const MAX_CELLS = 128;
const MOST_USED = 0.75; // of the cells, so that some are left for what comes
const ASK_MS = 1000; // between two questions about the chat's own blocks
const MOST_REQUESTS = 16;
const STATES = ["active", "cached", "free"];
const NOTHING = { active: 0, shared: 0, cached: 0 };

/** How many blocks a cell stands for: as few as let the map show all that are used, and room beside them. */
export function scaleOf({ active, cached, free }) {
  let scale = 1;
  while (scale * MAX_CELLS < active + cached + free && active + cached > scale * MAX_CELLS * MOST_USED) scale *= 2;
  return scale;
}

/** How many of `cells` each state gets: in proportion, but a state that has blocks has at least one. */
export function shareCells({ active, cached, free }, cells) {
  const total = active + cached + free;
  if (total === 0) return { active: 0, cached: 0, free: 0 };
  const share = (n) => (n > 0 ? Math.max(1, Math.round((n * cells) / total)) : 0);
  const shares = { active: share(active), cached: share(cached) };
  const most = cells - (free > 0 ? 1 : 0);
  while (shares.active + shares.cached > most) {
    if (shares.active > shares.cached) shares.active -= 1;
    else shares.cached -= 1;
  }
  if (free === 0) shares[active >= cached ? "active" : "cached"] += cells - shares.active - shares.cached;
  return { ...shares, free: cells - shares.active - shares.cached };
}

/**
 * The classes of the cells, in order: those of a state together, of these first those with blocks of the chat's `own`,
 * and of these first the shared ones.
 */
export function cellsOf(blocks, own) {
  const total = blocks.active + blocks.cached + blocks.free;
  const scale = scaleOf(blocks);
  const cells = Math.min(Math.ceil(total / scale), MAX_CELLS);
  const used = blocks.active + blocks.cached;
  const free = Math.min(blocks.free, Math.max(cells * scale - used, 0));
  const shares = shareCells({ ...blocks, free }, cells);
  const some = (n, of) => Math.min(Math.ceil(n / scale), of);
  const shared = some(own.shared, shares.active);
  const active = Math.max(some(own.active, shares.active), shared);
  const cached = some(own.cached, shares.cached);
  const run = (count, name) => Array(count).fill(name);
  return [
    ...run(shared, "active own shared"),
    ...run(active - shared, "active own"),
    ...run(shares.active - active, "active"),
    ...run(cached, "cached own"),
    ...run(shares.cached - cached, "cached"),
    ...run(shares.free, "free"),
  ];
}

export class KvBar {
  #bar = document.getElementById("kv");
  #map = document.getElementById("kv-map");
  #size = document.getElementById("kv-size");
  #following = false;
  #lost;
  #requests;
  #blocks = null; // the counts that came last
  #own = NOTHING;
  #asked = ""; // of which requests the own blocks are
  #timer = 0;
  #again = false; // to be asked when the time has come

  /**
   * lost() is called when the stream has ended: the server cannot be reached, or serves no more. requests() tells of
   * which requests the blocks are the chat's own.
   */
  constructor(lost, requests) {
    this.#lost = lost;
    this.#requests = requests;
  }

  /** The chat's own blocks may be others now. */
  look() {
    const names = this.#requests().slice(0, MOST_REQUESTS).join();
    if (names !== this.#asked) {
      this.#asked = names;
      this.#own = NOTHING;
      if (this.#blocks) this.#draw();
    }
    if (names === "" || !this.#following) return;
    this.#again = this.#timer !== 0;
    if (this.#again) return;
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      if (this.#again) this.look();
    }, ASK_MS);
    this.#ask(names);
  }

  async #ask(names) {
    try {
      const own = await (await request(`/v1/blocks/own?requests=${encodeURIComponent(names)}`)).json();
      if (names !== this.#asked) return;
      this.#own = own;
      this.#draw();
    } catch {
      // Then none are marked.
    }
  }

  /** Draws what the stream tells for as long as the page is visible. Calls meanwhile change nothing. */
  async follow() {
    if (this.#following) return;
    this.#following = true;
    try {
      for (;;) await this.#followUntilHidden();
    } catch {
      this.#bar.hidden = true;
      this.#following = false;
      this.#lost();
    }
  }

  /** A page that nobody sees gives its connection back: a browser has few for each server. */
  async #followUntilHidden() {
    if (document.hidden) {
      await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      return;
    }
    const abort = new AbortController();
    const hide = () => abort.abort();
    document.addEventListener("visibilitychange", hide, { once: true });
    try {
      await followCounts(abort.signal, (counts) => {
        this.#blocks = counts;
        this.#draw();
        this.look();
      });
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
  }

  #draw() {
    const [blocks, own] = [this.#blocks, this.#own];
    const total = blocks.active + blocks.cached + blocks.free;
    const classes = cellsOf(blocks, own);
    if (this.#map.childElementCount !== classes.length) {
      this.#map.replaceChildren(...classes.map(() => element("i")));
    }
    classes.forEach((name, i) => {
      const cell = this.#map.children[i];
      if (cell.className !== name) cell.className = name;
    });
    for (const state of STATES) this.#tell(state, blocks[state]);
    this.#tell("own", own.active + own.cached);
    this.#tell("shared", own.shared);
    const scale = scaleOf(blocks);
    const undrawn = total - classes.length * scale;
    const notes = [`${total.toLocaleString("en")} blocks of ${blocks.block_size} tokens`];
    if (scale > 1) notes.push(`${scale} a square`);
    this.#size.textContent = notes.join(", ");
    this.#size.title = undrawn > 0 ? `${undrawn.toLocaleString("en")} free ones are not drawn` : "";
    const mine = own.active + own.cached > 0 ? `; ${own.active + own.cached} of this chat, ${own.shared} of them shared` : "";
    this.#map.setAttribute(
      "aria-label",
      `KV cache: ${blocks.active} blocks active, ${blocks.cached} cached, ${blocks.free} free, of ${total}${mine}`,
    );
    this.#bar.hidden = false;
  }

  /** What the legend says of a kind; of the chat's own only when there are any. */
  #tell(kind, count) {
    const place = document.getElementById(`kv-${kind}`);
    place.textContent = count.toLocaleString("en");
    if (!STATES.includes(kind)) place.parentNode.hidden = count === 0;
  }
}
