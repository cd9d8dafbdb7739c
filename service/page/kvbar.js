// The small map of the KV cache's blocks, by the stream of their counts. The whole map is the page /blocks.

import { blockEvents } from "./blocks/updates.js";
import { element } from "./dom.js";

const MAX_CELLS = 128;
const STATES = ["active", "cached", "free"];

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

export class KvBar {
  #bar = document.getElementById("kv");
  #map = document.getElementById("kv-map");
  #size = document.getElementById("kv-size");
  #following = false;
  #lost;

  /** `lost` is called when the stream has ended: the server cannot be reached, or serves no more. */
  constructor(lost) {
    this.#lost = lost;
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
      for await (const counts of blockEvents("counts", abort.signal)) this.#draw(counts);
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
  }

  #draw(blocks) {
    const total = blocks.active + blocks.cached + blocks.free;
    const cells = Math.min(total, MAX_CELLS);
    const shares = shareCells(blocks, cells);
    const states = STATES.flatMap((state) => Array(shares[state]).fill(state));
    if (this.#map.childElementCount !== cells) {
      this.#map.replaceChildren(...states.map(() => element("i")));
    }
    states.forEach((state, i) => {
      const cell = this.#map.children[i];
      if (cell.className !== state) cell.className = state;
    });
    for (const state of STATES) {
      document.getElementById(`kv-${state}`).textContent = blocks[state].toLocaleString("en");
    }
    this.#size.textContent = `${total.toLocaleString("en")} blocks of ${blocks.block_size} tokens`;
    this.#map.setAttribute(
      "aria-label",
      `KV cache: ${blocks.active} blocks active, ${blocks.cached} cached, ${blocks.free} free, of ${total}`,
    );
    this.#bar.hidden = false;
  }
}
